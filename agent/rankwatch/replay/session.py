"""A replay: what it does, one after the other."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..rerun.backward_rerun import origin_of_gradient
from ..rerun.limit import Limit
from ..rerun.repetition import repeat
from ..shared.types.trip import Operator, Source
from .call import of_rows, users_code
from .code import UsersCode
from .opened import OpenedCapsule, find_capsule, open_capsule
from .replay_options import ReplayOptions
from .repro import write_repro
from .summary import AS_TRAINED, ReplayFindings
from .trial import ForwardResult, Trial, dtypes_of, enough, rows_of

MAX_SECONDS = 300
"""For one run of ``repro.py``."""


def replay(options: ReplayOptions) -> ReplayFindings:
    """Replays a capsule. Raises UsageError if it cannot."""
    dtypes = dtypes_of(options.precision)
    capsule = open_capsule(find_capsule(options.capsule))
    manifest = capsule.manifest
    code, make = users_code(capsule, options.module, stored=options.stored_code)
    trial = Trial(capsule, code, make)
    try:
        call = trial.call()
    except UsageError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise UsageError(
            f"the module cannot be made of the capsule: {why}. --module MODULE:FUNCTION names a function that makes it"
            f"{_other_torch(capsule)}"
        ) from error
    devices = _devices(options.device)
    found = ReplayFindings(capsule.path, manifest, str(devices[0]))
    found.notes += _notes(capsule)
    _repeat(trial, devices[0], options.repeat, found)
    if found.error:
        found.error += _other_torch(capsule)
        found.notes += code.notes
        return found
    _name_operator(trial, devices[0], found)
    _try_precisions(trial, devices, dtypes, found)
    if found.recurred:
        _find_rows(trial, devices[0], rows_of(call), found)
    _write_repro(options, capsule, code, found)
    if trial.draws and not manifest["random_at_entry"]:
        found.notes.append(
            "the module draws random numbers, and the capsule does not have those of the training: its own were drawn after them"
        )
    if trial.drawn:
        found.notes.append(
            "the capsule has no inputs (capsule=no-inputs): drawn at random, in the shapes and ranges of the real ones, were "
            + "; ".join(trial.drawn)
        )
    found.notes += code.notes
    found.notes += [f"--module {one} took the place of the code of the training" for one in options.module]
    found.differs = bool(code.notes or trial.drawn or options.module or capsule.manifest["left_out"])
    return found


def _devices(names: Sequence[str]) -> list[torch.device]:
    """The devices of these names; without a name, those that are here."""
    found = []
    for name in names or ("cuda", "cpu"):
        try:
            device = torch.device(name)
            torch.empty(1, device=device).item()
        except Exception:  # noqa: BLE001  each kind of device has its own
            if names:
                raise UsageError(f"--device {name}: torch cannot compute on it here; it can on cpu") from None
            continue
        found.append(device)
    return found


def _notes(capsule: OpenedCapsule) -> list[str]:
    versions, notes = capsule.manifest["versions"], []
    if versions["torch"] != torch.__version__:
        notes.append(f"torch is {torch.__version__} here and was {versions['torch']} in the training: bits may differ")
    gpu = versions.get("gpu", "")
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if gpu and gpu != here:
        notes.append(f"the training ran on {gpu}, this is {here or 'a CPU'}: bits may differ")
    if capsule.manifest["left_out"]:
        notes.append(f"not in the capsule: {', '.join(capsule.manifest['left_out'][:8])}")
    return notes


def _other_torch(capsule: OpenedCapsule) -> str:
    trained = capsule.manifest["versions"]["torch"]
    return "" if trained == torch.__version__ else f" (torch is {torch.__version__} here, and was {trained} in the training)"


def _repeat(trial: Trial, device: torch.device, times: int, found: ReplayFindings) -> None:
    outcomes = [trial.run(device) for _ in range(times)]
    found.of, found.recurred = times, sum(one.is_bad for one in outcomes)
    found.error = next((one.error for one in outcomes if one.error), "")
    found.same_bits = len({one.digest for one in outcomes}) == 1
    known = [trial.is_as_trained(one) for one in outcomes if one.is_bad]
    found.as_trained = known[0] if known else None


def _name_operator(trial: Trial, device: torch.device, found: ReplayFindings) -> None:
    limit = Limit(time.monotonic() + MAX_SECONDS)
    with trial.surrounded(device):
        if found.is_backward:
            repeated = origin_of_gradient(trial.root_run(trial.call(device)), limit)
        else:
            repeated, _ = repeat([trial.forward(trial.call(device))], limit)
    if repeated.given is not None and repeated.operator is not None:
        found.no_operator = f"it was bad before this forward: {repeated.operator.name} is the first that read it"
    elif repeated.operator is not None:
        found.operator = _with_known_line(repeated.operator, found.about["trip"])
    elif found.recurred:
        found.no_operator = f"not found: {repeated.note or 'the inputs or weights were bad before'}"


def _with_known_line(operator: Operator, trip: dict[str, Any]) -> Operator:
    """The user's line that called one of torch's own modules is not run here; the training had it on its stack."""
    is_same = operator.source is None and trip["source"] is not None and trip["operator"] == operator.name
    return dataclasses.replace(operator, source=Source(*trip["source"])) if is_same else operator


def _try_precisions(trial: Trial, devices: list[torch.device], dtypes: list[torch.dtype], found: ReplayFindings) -> None:
    found.table[AS_TRAINED] = {str(device): trial.run(device) for device in devices}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        found.table[name] = {str(device): trial.run(device, dtype=dtype) for device in devices}


def _find_rows(trial: Trial, device: torch.device, rows: int, found: ReplayFindings) -> None:
    if trial.drawn:
        found.why_no_rows = "not looked for: the inputs were drawn at random"
        return
    if rows < 2:
        found.why_no_rows = "the inputs have no rows to halve" if not rows else "the batch has one row"
        return
    errors: list[str] = []

    def is_bad(begin: int, end: int) -> bool:
        outcome: ForwardResult = trial.run(device, of_rows(begin, end, rows))
        if outcome.error:
            errors.append(outcome.error)
        return outcome.is_bad

    begin, end = enough(rows, is_bad)
    if errors and end - begin == rows:
        found.why_no_rows = f"not known: with half of the rows it raises {errors[0]}"
        return
    found.rows = begin, end, rows
    if end - begin < rows:
        others = [is_bad(*some) for some in ((0, begin), (end, rows)) if some[0] < some[1]]
        found.others_bad = None if errors else any(others)


def _write_repro(options: ReplayOptions, capsule: OpenedCapsule, code: UsersCode, found: ReplayFindings) -> None:
    """Writes the script, and runs it once: what is said of it is then true."""
    path = options.repro or Path(capsule.path, "repro.py")
    if not capsule.manifest["has_inputs"]:
        found.notes.append("no repro.py: the capsule has no inputs")
        return
    is_cut = found.rows is not None and found.rows[1] - found.rows[0] < found.rows[2]
    try:
        write_repro(path, capsule, code.texts, rows=found.rows if is_cut else None, module=options.module)
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=MAX_SECONDS)
    except OSError as error:
        found.notes.append(f"no repro.py: cannot write {path}: {error.strerror}; --repro FILE names another place")
        return
    except subprocess.TimeoutExpired:
        found.repro = f"{path} (it ran for {MAX_SECONDS} s without an end)"
        return
    said = done.stdout.strip().rpartition("\n")[2]
    if said.startswith("inf or nan: "):
        found.repro = f"{path} (run once, by itself: {'inf or nan again' if not done.returncode else 'finite'})"
    else:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        found.repro = f"{path} (it does not run by itself yet: {last})"
