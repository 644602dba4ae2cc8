"""The Hugging Face detector as an oracle: both detectors over the same training, and the comparison of their output.

Ours may print three things that theirs does not: keyword inputs, the parts of a container that theirs calls
``not a tensor``, and floating buffers. Any other difference is an AssertionError.
"""

from __future__ import annotations

import enum
import inspect
import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[Any, int], Tensor]
"""The forward of batch ``number``: (model, number) -> loss."""
Detector = Callable[..., Any]
"""The class under test: ours or theirs."""


@dataclass(frozen=True)
class Outcome:
    """What a detector printed, and the error that ended its training (in the forward of ``batch``), if one did."""

    text: str
    error: ValueError | None
    batch: int | None = None


@dataclass(frozen=True)
class FrameText:
    """A frame as printed: qualified name, class name, and its lines as (the first 17 columns, label)."""

    module: str
    module_class: str
    lines: list[tuple[str, str]]


@dataclass
class Extras:
    """What ours printed beyond theirs, each as (module, label)."""

    keywords: list[tuple[str, str]] = field(default_factory=list)
    buffers: list[tuple[str, str]] = field(default_factory=list)
    opened: list[tuple[str, str]] = field(default_factory=list)
    """Containers, by the label of the line that theirs printed for them."""


class Section(enum.IntEnum):
    """The parts of a frame in the order they are printed."""

    PARAMETERS = 0
    BUFFERS = 1
    POSITIONAL = 2
    KEYWORDS = 3
    OUTPUTS = 4


def train(detector: Detector, model: nn.Module, step: Step, batches: int = 5, **options: Any) -> Outcome:
    """Trains for ``batches`` steps under a detector, with the same random numbers in every run."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    number = 0

    def loop(model: nn.Module) -> None:
        nonlocal number
        for number in range(batches):
            torch.manual_seed(number)
            step(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()

    outcome = run(detector, model, loop, **options)
    return outcome if outcome.error is None else replace(outcome, batch=number)


def run(detector: Detector, model: nn.Module, use: Callable[[Any], object], **options: Any) -> Outcome:
    """A detector's output for one use of the model."""
    error = None
    with redirect_stdout(io.StringIO()) as out, closed_at_end(detector(model, **options)):
        try:
            use(model)
        except ValueError as raised:
            error = raised
    return Outcome(out.getvalue(), error)


def closed_at_end(detector: Any) -> AbstractContextManager[Any]:
    """Closes our detector; theirs cannot be closed."""
    return closing(detector) if hasattr(detector, "close") else nullcontext(detector)


def check_parity(theirs: str, ours: str, model: nn.Module) -> Extras:
    """Asserts that ``ours`` equals ``theirs`` line by line, except for the three extras; returns them."""
    left, right = parse(theirs), parse(ours)
    skeletons = list(map(_skeleton, left)), list(map(_skeleton, right))
    assert skeletons[0] == skeletons[1], "\n".join(unified_diff(*skeletons, "theirs", "ours", lineterm=""))
    modules = dict(model.named_modules())
    extras = Extras()
    for their_item, our_item in zip(left, right, strict=True):
        if isinstance(their_item, FrameText) and isinstance(our_item, FrameText):
            _check_frame(their_item, our_item, modules[our_item.module], extras)
    return extras


def parse(text: str) -> list[str | FrameText]:
    """The frames of a text, and all its other lines as they are."""
    items: list[str | FrameText] = []
    for line in text.split("\n"):
        header = _FRAME.fullmatch(line)
        value = _VALUE.fullmatch(line)
        last = items[-1] if items else ""
        if header:
            items.append(FrameText(header[1], header[2], []))
        elif value and isinstance(last, FrameText):
            last.lines.append((value[1], value[2]))
        else:
            items.append(line)
    return items


_FRAME = re.compile(r" {18}(\S*) (\w+)")
_NUMBER = r"(?:\d\.\d\de[+-]\d\d| {5}inf| {5}nan)"
_VALUE = re.compile(rf"(?=.{{17}} \S+$)({_NUMBER} {_NUMBER}| +\w[\w ]*) (\S+)")


def _skeleton(item: str | FrameText) -> str:
    return item if isinstance(item, str) else f"frame {item.module} {item.module_class}"


def _check_frame(theirs: FrameText, ours: FrameText, module: nn.Module, extras: Extras) -> None:
    where = f"{ours.module} {ours.module_class}"
    sections = [_section(label, module, where) for _, label in ours.lines]
    assert sections == sorted(sections), f"{where}: the parts of the frame are out of order"

    labels = [label for _, label in ours.lines]
    buffers = [label for label, section in zip(labels, sections, strict=True) if section is Section.BUFFERS]
    floating = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_floating_point()]
    assert buffers == floating, f"{where}: the floating buffers"
    extras.buffers += [(ours.module, label) for label in buffers]
    keywords = [label for label, section in zip(labels, sections, strict=True) if section is Section.KEYWORDS]
    extras.keywords += [(ours.module, label) for label in keywords]

    added = (Section.BUFFERS, Section.KEYWORDS)
    rest = [line for line, section in zip(ours.lines, sections, strict=True) if section not in added]
    for line in theirs.lines:
        if rest and rest[0] == line:
            del rest[0]
            continue
        figures, label = line
        assert figures == f"{'not a tensor':>17}", f"{where}: theirs {line}, ours {rest[:1]}"
        parts = _parts(rest, label)
        assert parts, f"{where}: nothing stands for theirs {line}"
        del rest[: len(parts)]
        extras.opened.append((ours.module, label))
    assert not rest, f"{where}: lines that theirs has not: {rest}"


def _parts(lines: list[tuple[str, str]], label: str) -> list[tuple[str, str]]:
    """The lines at the start of ``lines`` that are parts of the container ``label``."""
    parts = []
    for line in lines:
        if not line[1].startswith((f"{label}[", f"{label}.")):
            break
        parts.append(line)
    return parts


def _section(label: str, module: nn.Module, where: str) -> Section:
    if label in module._parameters:
        return Section.PARAMETERS
    if label in module._buffers:
        return Section.BUFFERS
    if re.match(r"output($|[.\[])", label):
        return Section.OUTPUTS
    argument = re.match(r"input\[(\w+)\]($|[.\[])", label)
    assert argument, f"{where}: what is {label}?"
    if argument[1].isdigit():
        return Section.POSITIONAL
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    assert takes_any or argument[1] in parameters, f"{where}: its forward takes no {argument[1]}"
    return Section.KEYWORDS
