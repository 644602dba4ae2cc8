"""``python -m rankwatch.doctor``, ``torchrun ... -m rankwatch.doctor``, ``srun ... python -m rankwatch.doctor``."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import EXIT_ERROR, UsageError
from ..tell.abort import say, write_error_file
from .alone import examine_alone
from .bounded import describe
from .finding import State
from .options import Options, parse
from .place import Meeting, Place, find_meeting, find_place
from .quiet import quiet
from .report import Report
from .table import render, to_json


def main(argv: Sequence[str] | None = None) -> int:
    """One rank's part; returns its exit code. Threads of checks that hang may be left behind: end the process by force."""
    options = parse(argv)
    env = dict(os.environ)
    try:
        place = find_place(env)
        meeting = find_meeting(env, place)
    except UsageError as error:
        say(f"error: {error}")
        return error.exit_code
    if importlib.util.find_spec("torch") is None:
        return _without_torch(place, env, options)
    with tempfile.TemporaryDirectory(prefix="rankwatch-doctor-") as folder, quiet(Path(folder) / "output"):
        log = _prepare(Path(folder)) if options.nccl_debug else None
        return _with_torch(place, meeting, env, options, log)


def _with_torch(place: Place, meeting: Meeting, env: Mapping[str, str], options: Options, log: Path | None) -> int:
    # The doctor has its own limits; what hangs is not to be ended, or talked about, by torch.
    os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from .device import has_nccl
    from .room import Room
    from .run import Leader, follow
    from .tasks import Setting

    backend = options.backend if options.backend != "auto" else "nccl" if has_nccl() else "gloo"
    setting = Setting(place, env, backend, options.check_timeout, log)
    try:
        room = Room(meeting, env.get("TORCHELASTIC_RESTART_COUNT", "0"), options.timeout)
    except RuntimeError as error:
        say(f"doctor: {place.tag} rank {place.rank} of {place.world_size} {_cannot_meet(meeting, options, error)}")
        return EXIT_ERROR
    try:
        room.arrive(place)
        if place.rank != 0:
            return follow(setting, room, options.timeout)
        leader = Leader(setting, room, options.timeout, all_pairs=options.all_pairs)
        code = _conclude(leader.examine(), options)
        leader.dismiss(code)
        return code
    except RuntimeError as error:
        say(f"doctor: {place.tag} rank {place.rank} of {place.world_size} lost the others at {meeting}: {describe(error)}")
        return EXIT_ERROR


def _without_torch(place: Place, env: Mapping[str, str], options: Options) -> int:
    if place.world_size > 1:
        say(f"doctor: {place.tag} rank {place.rank} of {place.world_size}: torch is not installed for {sys.executable} here")
        return EXIT_ERROR
    return _conclude(examine_alone(place, env, options.check_timeout), options)


def _conclude(report: Report, options: Options) -> int:
    try:
        sys.stdout.write(to_json(report) if options.json else render(report))
        sys.stdout.flush()
    except BrokenPipeError:  # its reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if report.is_well:
        return 0
    failed = [told.finding for told in report.told if told.finding.state is State.FAIL]
    reasons = "\n".join(f"{finding.check}: {finding.found}" for finding in failed[:4])
    write_error_file(f"rankwatch doctor\n{reasons}", time.time(), is_culprit=True)
    return EXIT_ERROR


def _cannot_meet(meeting: Meeting, options: Options, error: RuntimeError) -> str:
    if meeting.is_opened_here:
        return f"cannot open the store at {meeting}: {describe(error)}; is another job on that port? set MASTER_PORT"
    return (
        f"does not reach the store at {meeting} within {options.timeout:g} s ({describe(error)}): has rank 0 started there, does "
        "the name resolve here, does a firewall let that port through?"
    )


def _prepare(folder: Path) -> Path:
    """Has NCCL log to a file."""
    log = folder / "nccl.log"
    if os.environ.get("NCCL_DEBUG", "").upper() != "TRACE":
        os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_FILE"] = str(log)
    return log


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
