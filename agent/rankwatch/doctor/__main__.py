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
from ..shared.printable import page
from ..shared.system.installed import describe_missing
from ..shared.system.standard_output import OutputError, checked_output
from ..tell.abort import say, write_error_file
from .doctor_options import DoctorOptions, parse
from .placement import Placement, StoreAddress, find_placement, find_store
from .quiet import quiet
from .report import DoctorReport
from .table import render, to_json
from .time_limit import describe


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank; returns its exit code. Checks that hang leave threads behind, so the caller must end with os._exit."""
    options = parse(argv)
    env = dict(os.environ)
    try:
        placement = find_placement(env)
        store = find_store(env, placement)
    except UsageError as error:
        say(f"error: {error}")
        return error.exit_code
    try:
        if importlib.util.find_spec("torch") is None:
            return _without_torch(placement, env, options)
        with tempfile.TemporaryDirectory(prefix="rankwatch-doctor-") as folder, quiet(Path(folder) / "output"):
            log = _prepare(Path(folder)) if options.nccl_debug else None
            return _with_torch(placement, store, env, options, log)
    except ImportError as error:
        say(f"error: {describe_missing('the doctor', error)}")
        return EXIT_ERROR


def _with_torch(
    placement: Placement, store: StoreAddress, env: Mapping[str, str], options: DoctorOptions, log: Path | None
) -> int:
    # The doctor has its own time limits: torch must neither end nor log what hangs.
    os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from .checks.device import has_nccl
    from .rendezvous import Rendezvous
    from .run import Leader, follow
    from .tasks import Setting

    backend = options.backend if options.backend != "auto" else "nccl" if has_nccl() else "gloo"
    setting = Setting(placement, env, backend, options.check_timeout, log)
    who = f"{placement.tag} rank {placement.rank} of {placement.world_size}"
    try:
        rendezvous = Rendezvous(store, env.get("TORCHELASTIC_RESTART_COUNT", "0"), options.timeout)
    except RuntimeError as error:
        say(f"doctor: {who} {_no_store(store, options, error)}")
        return EXIT_ERROR
    try:
        rendezvous.arrive(placement)
        if placement.rank != 0:
            return follow(setting, rendezvous, options.timeout)
        leader = Leader(setting, rendezvous, options.timeout, all_pairs=options.all_pairs)
        code = _conclude(leader.examine(), options)
        leader.dismiss(code)
        return code
    except RuntimeError as error:
        say(f"doctor: {who} lost the others at {store}: {describe(error)}")
        return EXIT_ERROR


def _without_torch(placement: Placement, env: Mapping[str, str], options: DoctorOptions) -> int:
    if placement.world_size > 1:
        who = f"{placement.tag} rank {placement.rank} of {placement.world_size}"
        say(f"doctor: {who}: torch is not installed for {sys.executable} here")
        return EXIT_ERROR
    from .checks.alone import examine_alone

    return _conclude(examine_alone(placement, env, options.check_timeout), options)


def _conclude(report: DoctorReport, options: DoctorOptions) -> int:
    """Prints the report; returns the exit code."""
    code = 0
    try:
        with checked_output():
            sys.stdout.write(to_json(report) if options.json else page(render(report)))
    except OutputError as error:
        say(f"error: {error}")
        code = error.exit_code
    failed = report.failed
    if not failed:
        return code
    reasons = "\n".join(f"{result.check}: {result.found}" for result in failed[:4])
    write_error_file(f"rankwatch doctor\n{reasons}", time.time(), is_culprit=True)
    return EXIT_ERROR


def _no_store(store: StoreAddress, options: DoctorOptions, error: RuntimeError) -> str:
    if store.is_opened_here:
        return f"cannot open the store at {store}: {describe(error)}; is another job on that port? set MASTER_PORT"
    return (
        f"does not reach the store at {store} within {options.timeout:g} s ({describe(error)}): has rank 0 started there, does "
        "the name resolve here, does a firewall let that port through?"
    )


def _prepare(folder: Path) -> Path:
    """Makes NCCL log to a file; returns the file."""
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
