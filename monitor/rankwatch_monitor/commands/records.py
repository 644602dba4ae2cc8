"""The records that a command reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rankwatch.errors import UsageError

from ..record.reader import RunRecord
from ..record.schema import FILE, StoreError
from . import arguments as types


@contextmanager
def open_record(run: Path) -> Iterator[RunRecord]:
    """The record of the run in this folder. Raises UsageError, also for a record that turns out to be damaged."""
    with open_records([run]) as (record,):
        yield record


def connection_of(run: Path, given: str | None) -> str | Path:
    """Where none is given, the connection file of the collector that records this run; or else the usual one."""
    if given is None and (run / FILE).exists():
        with open_record(run) as record:
            own = Path(record.meta().get("connection", ""))
        given = str(own) if own.is_file() else None
        if given is None and not types.usual_connection().exists():
            raise UsageError(f"no collector has run {run.name} any more: `rankwatch report {run.name}` says how it ended")
    return given or types.usual_connection()


@contextmanager
def open_records(runs: list[Path]) -> Iterator[list[RunRecord]]:
    """As ``open_record``, for more than one run."""
    for run in runs:
        check_run(run)
    with readable(), ExitStack() as stack:
        yield [stack.enter_context(RunRecord(run / FILE)) for run in runs]


def check_run(run: Path) -> None:
    """Raises UsageError where this is no run's folder."""
    if not (run / FILE).exists():
        raise UsageError(types.no_run(run, types.runs_folder()))


@contextmanager
def readable() -> Iterator[None]:
    """Raises UsageError where a record cannot be read."""
    try:
        yield
    except StoreError as error:
        where = error.path.parent if error.path is not None else "it"
        raise UsageError(f"{error}; is {where} a run's folder?") from None
