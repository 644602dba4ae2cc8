"""What a ``repro.py`` runs where the backward was bad, and not the forward."""

from __future__ import annotations

from collections.abc import Sequence

_TENSORS = '''
def tensors_of(value):
    """The tensors of an output, in the order in which the training counted them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        parts = list(value.values())
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        parts = value if isinstance(value, (list, tuple)) else [one for one in tree_leaves(value) if one is not value]
    return [tensor for part in parts for tensor in tensors_of(part)]

'''


def end_of_backward(gradients: str, modes: Sequence[str]) -> str:
    """The end of the script.

    Args:
        gradients: what each backward is handed, by the number of the output, as Python code.
        modes: the context managers around it.
    """
    return (
        f"{_TENSORS}\n"
        f"gradients = {gradients}\n"
        f"with {', '.join(modes)}, First():\n"
        "    output = module(*args, **kwargs)\n"
        "    outputs = list({id(value): value for value in tensors_of(output) if value.grad_fn is not None}.values())\n"
        "    for handed in filter(None, gradients):\n"
        "        made = [outputs[number] for number in handed]\n"
        "        torch.autograd.backward(made, list(handed.values()), retain_graph=True)\n"
        "found = [value.grad for value in module.parameters() if value.grad is not None]\n"
        'print("inf or nan:", any(map(is_bad, found)))\n'
        "sys.exit(0 if any(map(is_bad, found)) else 1)\n"
    )
