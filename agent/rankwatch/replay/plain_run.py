"""What ``repro.py`` runs of a capsule: its forward, or forward and backward, as a training would run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..measure.walk import leaves, outputs_of
from ..touch.parts import parameters_in
from .call import Call


class FirstBad(TorchDispatchMode):
    """Prints the first operator that made inf or nan of finite numbers."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_finite = not any(map(is_bad, tree_leaves((args, kwargs))))
        result = func(*args, **kwargs or {})
        if not self.found and is_finite and any(map(is_bad, tree_leaves(result))) and "empty" not in str(func):
            self.found = True
            print("first bad operator:", func)
        return result


def is_bad(value: Any) -> bool:
    return isinstance(value, Tensor) and not bool(torch.isfinite(value).all())


def forward(call: Call, label: str, inner: dict[str, Any] | None) -> list[Any]:
    """The outputs of the module that went bad.

    Args:
        label: which of its outputs was bad.
        inner: the name of the module, if it is one inside of the module that is called, and in which of its calls it went bad.
    """
    outputs: list[Any] = []
    module = call.module if inner is None else call.module.get_submodule(inner["name"])
    nth = 1 if inner is None else inner["nth"]
    module.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        call.module(*call.args, **call.kwargs)
    except Exception:
        if len(outputs) < nth:  # what comes after the module is not looked at
            raise
    named = leaves(outputs[nth - 1], "output")
    return [leaf for name, leaf in named if name == label] or [leaf for _, leaf in named]


def backward(call: Call) -> list[Any]:
    """The gradients of the parameters, once each output has been handed what it was handed in the training."""
    outputs = outputs_of(call.module(*call.args, **call.kwargs))
    for handed in filter(None, call.gradients):
        chosen = [outputs[number] for number in handed]
        torch.autograd.backward(chosen, list(handed.values()), retain_graph=True)
    return [parameter.grad for parameter in parameters_in(call.module) if parameter.grad is not None]
