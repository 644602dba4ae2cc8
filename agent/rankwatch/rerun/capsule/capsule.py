"""A capsule: the files from which a forward, and its backward, can be run again elsewhere, by ``rankwatch replay``.

``capsule.json`` has the module and its inputs (see ``encoding``), ``tensors.safetensors`` their tensors, ``sources/`` the user's
code. ``SHA256SUMS`` has the checksum of each, as ``sha256sum`` writes it. All is readable for its owner alone. A capsule is
written beside its place and then renamed: there is none that is not whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...measure.modules import class_name
from ...measure.walk import leaves
from ...shared.types.trip import Trip
from ...touch.parts import buffers_in, parameters_in
from ..forward import Forward
from . import capsule_code as sources
from . import surroundings
from .encoding import Encoder, TensorBag, TooLargeError
from .files import FORMAT, MANIFEST, SUMS, TENSORS
from .tensor_file import OutOfTimeError, digest_of, write_tensors

MAX_COMPARED = 1 << 24
"""Numbers in an output with a checksum."""


class CapsuleRules(NamedTuple):
    """What is written: at most ``limit`` bytes of tensors; without the inputs, if their owner does not want it."""

    folder: Path
    """The folder for the capsules of this rank's run."""
    rank: int = 0
    with_inputs: bool = True
    limit: int = 2 << 30


class CapsuleWritten(NamedTuple):
    """Where a capsule is, or why there is none."""

    path: Path | None
    why_not: str = ""


def write(
    rules: CapsuleRules,
    forward: Forward,
    trip: Trip,
    *,
    name: str = "",
    output: Any = None,
    gradients: Sequence[Mapping[int, Tensor]] = (),
    until: float = float("inf"),
) -> CapsuleWritten:
    """Writes the capsule of a forward that tripped, or whose backward did.

    Args:
        name: the name in the model of the module that the forward is of.
        output: what the forward returned; its checksums tell whether a replay returns the same bits.
        gradients: those that its backwards were handed, by the number of the output; without any, the forward tripped.
        until: of ``time.monotonic()``; a capsule that takes longer is given up.
    """
    place = rules.folder / f"rank-{rules.rank}"
    part = rules.folder / f".rank-{rules.rank}.{os.getpid()}.part"
    try:
        rules.folder.mkdir(parents=True, exist_ok=True)
        part.mkdir(mode=0o700)
        try:
            _write(part, rules, forward, trip, name, output, gradients, until)
            place = _free(place)
            part.rename(place)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    except OutOfTimeError:
        return CapsuleWritten(
            None, "not written: it takes longer than the close-up may (RANKWATCH_CLOSEUP=10 gives it ten seconds)"
        )
    except OSError as error:
        return CapsuleWritten(None, f"not written to {rules.folder}: {error.strerror or error}")
    except Exception as error:  # noqa: BLE001  out of memory, say: the report has it as a line
        return CapsuleWritten(None, f"not written: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
    return CapsuleWritten(place)


def _write(
    part: Path,
    rules: CapsuleRules,
    forward: Forward,
    trip: Trip,
    name: str,
    output: Any,
    gradients: Sequence[Mapping[int, Tensor]],
    until: float,
) -> None:
    module, args, kwargs, entry = forward.module, forward.args, forward.kwargs, forward.entry
    bag = TensorBag(rules.limit)
    encoder = Encoder(bag)
    devices = {leaf.device for _, leaf in leaves([args, kwargs], "") if isinstance(leaf, Tensor)}
    devices |= {value.device for value in [*parameters_in(module), *buffers_in(module)]}
    with torch.no_grad():
        # In this order, so that the limit cuts off the parameters and not the inputs.
        encoder.with_tensors = encoder.with_texts = rules.with_inputs
        try:
            given = {"args": encoder.encode(tuple(args), "input"), "kwargs": encoder.encode(dict(kwargs), "input")}
            handed = [
                [[number, encoder.encode(value, f"gradient[{number}]")] for number, value in one.items()]
                for one in gradients
            ]
        except TooLargeError:
            raise ValueError("its inputs have too many parts") from None
        encoder.with_texts = encoder.with_tensors = True
        drawn = surroundings.random_state(devices) if entry is None else entry.random_state
        states = {device: bag.put(value, f"random.{device}", with_values=True) for device, value in drawn.items()}
        encoder.with_tensors = rules.with_inputs
        made = encoder.encode(module, "")
        made["hooks"] = [one for one in made["hooks"] if one[0] != "_forward_pre_hooks"]  # the inputs are what they returned
        modules = sources.gather(encoder)
        results = [
            {"label": label, "shape": list(leaf.shape), "sha256": digest_of(leaf)}
            for label, leaf in leaves(output, "output")
            if isinstance(leaf, Tensor)
            and leaf.layout is torch.strided
            and rules.with_inputs
            and leaf.numel() <= MAX_COMPARED
        ]
    sums = {TENSORS: write_tensors(part / TENSORS, bag.tensors, until)}
    if modules:
        (part / "sources").mkdir(mode=0o700)
    described = {}
    for one, about in modules.items():
        file = f"sources/{one}.py"
        sums[file] = _put(part / file, about.pop("text").encode())
        described[one] = {**about, "source": file}
    with entry.again() if entry is not None else nullcontext(), torch.random.fork_rng(devices=[], enabled=entry is not None):
        around = surroundings.surroundings()
    manifest = {
        "format": FORMAT,
        "written_at": time.time(),
        "rank": rules.rank,
        "trip": _trip(trip),
        "name": name,
        "class": class_name(module),
        "label": forward.label,
        "inner": _inner(forward),
        "module": made,
        **given,
        "gradients": handed,
        "has_inputs": rules.with_inputs,
        "outputs": results,
        "random": states,
        "random_at_entry": entry is not None,
        "surroundings": {**around, "grad": entry.has_gradients if entry is not None else around["grad"]},
        "versions": surroundings.versions(),
        "path": [str(Path(folder).absolute()) for folder in sys.path if Path(folder or ".").is_dir()],
        "code": described,
        "absent": encoder.absent,
        "left_out": bag.left_out,
    }
    body = json.dumps(manifest, allow_nan=False, indent=1).encode("utf-8", "surrogateescape")
    sums[MANIFEST] = _put(part / MANIFEST, body)
    _put(part / SUMS, "".join(f"{digest}  {file}\n" for file, digest in sums.items()).encode())


def _inner(forward: Forward) -> dict[str, Any] | None:
    """The module inside of this one whose output was bad, and in which of its calls."""
    inner = forward.inner
    if inner is None or isinstance(inner, str):  # a mark is not seen without a watch
        return None
    names = [name for name, one in forward.module.named_modules() if one is inner]
    return {"name": names[0], "nth": forward.nth} if names else None


def _trip(trip: Trip) -> dict[str, Any]:
    spec, position = trip.frame.spec, trip.position
    rows: list[list[Any]] = []
    for row in trip.frame.readings:
        ends = [end if math.isfinite(end) else None for end in (row.abs_min, row.abs_max)]
        rows.append([row.label, row.dtype, *ends, row.state.name.lower()])
    return {
        "module": spec.module,
        "class": spec.module_class,
        "phase": spec.phase.name.lower(),
        "batch": position.batch,
        "eval": position.eval,
        "frame": position.frame,
        "optimizer_step": trip.optimizer_step,
        "label": trip.culprit.label,
        "state": trip.culprit.state.name.lower(),
        "readings": rows,
        "operator": trip.operator.name if trip.operator is not None else "",
        "source": list(trip.operator.source) if trip.operator is not None and trip.operator.source is not None else None,
    }


def _put(path: Path, body: bytes) -> str:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(body)
    return hashlib.sha256(body).hexdigest()


def _free(place: Path) -> Path:
    """The place, or the next one that is free: a rank that was started again writes beside its former capsule."""
    others = (place.with_name(f"{place.name}.{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([place], others) if not one.exists())
