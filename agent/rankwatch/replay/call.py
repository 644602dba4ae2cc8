"""A capsule -> a module with its inputs, on a device, with all rows or some, and what the training had set around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..rerun.capsule.surroundings import surrounded
from ..touch.parts import modules_in
from .code import UsersCode
from .opened import OpenedCapsule
from .rebuild import Builder

SEED = 0
"""For inputs that are drawn because the capsule has none."""


class Call(NamedTuple):
    """A module with its inputs, made anew from the capsule."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: Sequence[dict[int, Tensor]] = ()
    """What its backwards are handed, by the number of the output."""
    drawn: Sequence[str] = ()
    """The inputs that were drawn at random."""


def users_code(
    capsule: OpenedCapsule, module: Sequence[str] = (), *, stored: bool = False, copies: Path | None = None
) -> tuple[UsersCode, Callable[[], nn.Module] | None]:
    """The user's code, and what makes the module, if that is not the capsule's class.

    Args:
        module: the options ``--module``: OLD=NEW renames a Python module, and the last MODULE:NAME makes the module.
        stored: as of ``UsersCode``.
        copies: a folder of source texts that run in the place of the user's files.
    """
    manifest = capsule.manifest
    renamed = dict(_renamed(one) for one in module if "=" in one)
    texts = None if copies is None else {one.stem: one.read_text(encoding="utf-8") for one in copies.glob("*.py")}
    rank = manifest["rank"], manifest["surroundings"].get("world_size", 1)
    known, path = manifest["code"], manifest["path"]
    code = UsersCode(known, capsule.sources, path, stored=stored, replaced=renamed, rank=rank, copies=texts)
    named = [one for one in module if "=" not in one]
    return code, _maker(named[-1], code, manifest["module"]) if named else None


def _renamed(text: str) -> tuple[str, str]:
    old, _, new = text.partition("=")
    if not old or not new or ":" in text:
        raise UsageError(
            f"--module {text}: expected OLD=NEW with the names of two modules, or MODULE:CLASS with the class alone"
        )
    return old, new


def _maker(name: str, code: UsersCode, form: dict[str, Any]) -> Callable[[], nn.Module] | None:
    """What ``--module`` names: a class takes the place of the capsule's, a function makes the module."""
    if ":" not in name:
        raise UsageError(f"--module {name}: expected MODULE:CLASS, such as model:Block, or OLD=NEW")
    made = code.find(name)
    if isinstance(made, type) and issubclass(made, nn.Module):
        form["class"] = {"name": name}
        return None
    if not callable(made):
        raise UsageError(f"--module {name} is neither a module's class nor a function that makes a module")

    def make() -> nn.Module:
        module = made()
        if not isinstance(module, nn.Module):
            raise UsageError(f"--module {name} returned {type(module).__name__}, no torch.nn.Module")
        return module

    return make


def make_call(
    capsule: OpenedCapsule, code: UsersCode, device: torch.device, make: Callable[[], nn.Module] | None = None
) -> Call:
    """The module and its inputs as they were, on this device.

    Args:
        make: makes the module, in the place of the class that the capsule names.
    """
    manifest = capsule.manifest
    builder = Builder(capsule, code, device, torch.Generator().manual_seed(SEED))
    form = manifest["module"]
    module = builder.build(form) if make is None else builder.fill_by_name(make(), form)
    args, kwargs = builder.build(manifest["args"]), builder.build(manifest["kwargs"])
    gradients = [{number: builder.build(form) for number, form in handed} for handed in manifest["gradients"]]
    return moved(Call(module, args, kwargs, gradients, builder.drawn), device)


def has_autocast(capsule: OpenedCapsule) -> bool:
    """Whether the forward ran under autocast."""
    return any(is_on for is_on, _ in capsule.manifest["surroundings"]["autocast"].values())


@contextlib.contextmanager
def as_in_training(capsule: OpenedCapsule, device: torch.device, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Flags, modes and random state as in the training. ``autocast``: to this dtype, if it was on."""
    manifest, around = capsule.manifest, capsule.manifest["surroundings"]
    if device.type == "cpu" and around["autocast"]["cuda"][0]:  # the CPU stands for the GPU
        around = {**around, "autocast": {"cpu": around["autocast"]["cuda"]}}
    if autocast is not None:
        name = str(autocast).removeprefix("torch.")
        around = {**around, "autocast": {one: (is_on, name) for one, (is_on, _) in around["autocast"].items()}}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), surrounded(around):
        for name, form in manifest["random"].items():
            if name == "cpu":
                torch.set_rng_state(capsule.tensors[form["tensor"]])
            elif device.type == "cuda":
                torch.cuda.set_rng_state(capsule.tensors[form["tensor"]], device)
        yield


def moved(call: Call, device: torch.device, dtype: torch.dtype | None = None) -> Call:
    """A call on another device, and with its floating tensors in another dtype."""

    def move(value: Tensor) -> Tensor:
        to = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
        if value.device == device and value.dtype == to:
            return value
        return value.detach().to(device, to).requires_grad_(value.requires_grad)

    module = call.module.to(device)
    module = module.to(dtype) if dtype is not None else module
    for inner in modules_in(module):
        for name, value in vars(inner).items():
            if isinstance(value, Tensor):
                vars(inner)[name] = move(value)
    args, kwargs, gradients = mapped((call.args, call.kwargs, call.gradients), move)
    return Call(module, args, kwargs, gradients, call.drawn)


def of_rows(begin: int, end: int, rows: int) -> Callable[[Call], Call]:
    """The same forward of these rows alone. Inputs with another first dimension stay whole."""

    def pick(value: Tensor) -> Tensor:
        return value[begin:end] if value.dim() and value.shape[0] == rows else value

    def change(call: Call) -> Call:
        args, kwargs, gradients = mapped((call.args, call.kwargs, call.gradients), pick)
        return Call(call.module, args, kwargs, gradients, call.drawn)

    return change


def mapped(value: Any, change: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if depth > 16 or value is None or isinstance(value, (str, bytes, int, float, torch.device, torch.dtype, torch.Size)):
        return value
    if isinstance(value, tuple):
        items = [mapped(item, change, depth + 1) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (list, dict)):
        keys = range(len(value)) if isinstance(value, list) else list(value)
        for key in keys:
            value[key] = mapped(value[key], change, depth + 1)
    if not isinstance(value, (list, type, nn.Module)) and hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            value.__dict__[name] = mapped(item, change, depth + 1)
    return value
