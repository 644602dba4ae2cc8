"""``rankwatch collector``: a collector for any number of runs. Its options are those of ``rankwatch run`` as well."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rankwatch.errors import UsageError
from rankwatch.shared.system.installed import to_add
from rankwatch.shared.system.log_lines import write_log
from rankwatch.shared.types.tuning import MAX_EVERY

from ..decide.core.options import Options
from ..serve.collector import DEFAULT_LISTEN
from ..serve.daemon import run_daemon
from ..serve.metrics.meters import Meters
from ..serve.settings import Settings
from ..views.text import FRAMES_ON_SCREEN
from . import arguments as types
from .archive import check_archive

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    groups = add_collector_options(parser, None, f"address to listen on (default: {DEFAULT_LISTEN}; port 0 picks one)")
    types.add_option(
        groups[REACHED],
        "--keep-keys",
        action="store_true",
        help="leave the connection file and keys at the end: the ranks reconnect to the next collector that uses the file",
    )
    groups[REACHED].add_argument(
        "--insecure", action="store_true", help="use plain text, to read the messages with tcpdump; on loopback alone"
    )


def main(arguments: argparse.Namespace) -> int:
    write_log(arguments.log_format)
    settings = settings_of(arguments)
    with metered(arguments) as meters:
        return run_daemon(settings, meters)


_OPTIONS = Options()


STOPPED, REACHED, TOLD, MEASURED = (
    "when ranks are stopped",
    "how ranks connect",
    "what is told, and where",
    "what is measured",
)
"""Groups of the options."""

Groups: TypeAlias = Mapping[str, argparse._ArgumentGroup]


class _Option(NamedTuple):
    """An option of the collector. ``default`` is the text that is parsed where neither the option nor its variable is given."""

    group: str
    name: str
    metavar: str
    parse: Callable[[str], object] | None
    default: str | None
    help: str


_TABLE = (
    _Option(STOPPED, "--heartbeat", "SECONDS", types.seconds, f"{_OPTIONS.heartbeat:g}",
        f"seconds between heartbeats; a rank that misses three is lost (default: {_OPTIONS.heartbeat:g})"),
    _Option(STOPPED, "--decision-window", "SECONDS", types.seconds, f"{_OPTIONS.decision_window:g}",
        f"seconds for which a verdict waits for ranks that have not answered (default: {_OPTIONS.decision_window:g})"),
    _Option(STOPPED, "--abort-grace", "SECONDS", types.seconds, f"{_OPTIONS.abort_grace:g}",
        f"seconds after an abort until a rank that has not ended is killed (default: {_OPTIONS.abort_grace:g})"),
    _Option(STOPPED, "--on-lost", "{abort,wait}", types.one_of("abort", "wait"), "abort",
        "what the other ranks do when a rank fails or is lost (default: abort)"),
    _Option(STOPPED, "--hold-limit", "SECONDS", types.seconds_or_never, f"{_OPTIONS.hold_limit:g}",
        "seconds for which an abort waits for a rank in rankwatch.hold(), a save say, before the grace begins; 0: it does "
        f"not (default: {_OPTIONS.hold_limit:g})"),
    _Option(STOPPED, "--stall-after", "SECONDS", types.seconds_or_never, f"{_OPTIONS.stall_after:g}",
        f"seconds without progress after which a rank has stalled; 0: never (default: {_OPTIONS.stall_after:g})"),
    _Option(STOPPED, "--on-stall", "{warn,abort}", types.one_of("warn", "abort"), "warn",
        "what to do when a rank has stalled (default: warn, in the log and the report)"),
    _Option(STOPPED, "--on-desync", "{note,abort}", types.one_of("note", "abort"), "note",
        "what to do when replicas that DDP, HSDP or a DTensor keeps equal differ (default: note, in the log and the report)"),
    _Option(TOLD, "--on-verdict", "CMD", None, "",
        "shell command for a run that did not finish well, and for a stall or desync in one that goes on: it has "
        "JSON on stdin, and 30 seconds"),
    _Option(TOLD, "--log-format", "{text,json}", types.one_of("text", "json"), "text",
        "the lines on stderr: text with time and level, or one JSON object a line (default: text)"),
    _Option(TOLD, "--archive", "URL", None, "",
        "add each run that is over to this archive, for rankwatch fleet: a folder, or a URL such as s3://bucket/runs"),
    _Option(TOLD, "--frames", "N", types.whole("N", 1, 1 << 31), str(FRAMES_ON_SCREEN),
        f"print the last N frames above a verdict; the record has all (default: {FRAMES_ON_SCREEN})"),
    _Option(TOLD, "--metrics", "[HOST]:PORT", types.listening, None,
        "serve metrics for Prometheus at this address; without HOST on this machine alone, with * on all interfaces"),
)  # fmt: skip
"""Each has a variable: RANKWATCH_ and its name."""


def add_collector_options(parser: argparse.ArgumentParser, listen: str | None, listen_help: str) -> Groups:
    groups = {name: parser.add_argument_group(name) for name in (STOPPED, TOLD, MEASURED, REACHED)}
    reached = groups[REACHED]
    reached.add_argument("--listen", metavar="tcp://HOST:PORT", default=types.env("listen", listen), help=listen_help)
    reached.add_argument(
        "--address",
        metavar="tcp://HOST:PORT",
        default=types.env("address", None),
        help="address that ranks connect to, if it is another one: a service's, or this host's on a faster network; "
        "port 0 stands for the port of --listen (default: this host's name and the port of --listen)",
    )
    reached.add_argument(
        "--connection-file",
        metavar="PATH",
        type=Path,
        default=types.env("connection_file", None),
        help="file with the address and the keys for the ranks (default: RUNS_DIR/connection.json; of run: a private file)",
    )
    types.add_runs_dir(groups[TOLD])
    for group, name, metavar, parse, default, text in _TABLE:
        value = types.env(name[2:], default)
        types.add_option(groups[group], name, metavar=metavar, type=parse, default=value, help=text)
    types.add_option(groups[TOLD], "--metrics-per-rank", action="store_true", help="serve metrics of each rank, too")
    types.add_option(
        groups[MEASURED],
        "--every",
        metavar="K",
        type=types.whole("K", 1, MAX_EVERY),
        help="measure each K-th batch only, whatever the ranks' own option says (default: the ranks' own option)",
    )
    return groups


@contextmanager
def metered(arguments: argparse.Namespace) -> Iterator[Meters | None]:
    """Serves meters at ``--metrics`` while this is entered. Yields None where --metrics is not given."""
    if arguments.metrics is None:
        yield None
        return
    try:
        from ..serve.metrics.server import MetricsServer
    except ModuleNotFoundError as error:
        raise UsageError(f"--metrics needs {error.name}: {to_add('metrics')}") from None
    meters = Meters(time.monotonic())
    with MetricsServer(arguments.metrics, meters, per_rank=arguments.metrics_per_rank) as server:
        log.info("metrics on %s", server.url)
        yield meters


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Raises UsageError where the archive cannot work: the end of a run is a bad time to say so."""
    if arguments.archive:
        check_archive(arguments.archive)
    same = {
        name: value for name, value in vars(arguments).items() if name in Settings.__dataclass_fields__ and value is not None
    }
    return Settings(options=options_of(arguments), **same)


def options_of(arguments: argparse.Namespace) -> Options:
    names = "heartbeat", "decision_window", "abort_grace", "hold_limit", "stall_after", "every"
    aborts = {f"abort_on_{name}": getattr(arguments, f"on_{name}") == "abort" for name in ("lost", "stall", "desync")}
    return Options(**{name: getattr(arguments, name) for name in names}, **aborts)
