"""``rankwatch collector``: a collector for any number of runs. Its options are those of ``rankwatch run`` as well."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankwatch.errors import UsageError
from rankwatch.shared.link import wire
from rankwatch.shared.system.installed import to_add
from rankwatch.shared.system.log_lines import write_log

from ..decide.core.options import Options
from ..serve.collector import DEFAULT_LISTEN
from ..serve.daemon import run_daemon
from ..serve.metrics.meters import Meters
from ..views.text import FRAMES_ON_SCREEN
from . import arguments as types
from .archive import check_archive

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_collector_options(parser, None, f"address to listen on (default: {DEFAULT_LISTEN}; port 0 picks one)")
    types.add_option(
        parser,
        "--keep-keys",
        action="store_true",
        help="leave the connection file and keys at the end: the ranks reconnect to the next collector that uses the file",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="use plain text, to read the messages with tcpdump; on loopback alone"
    )


def main(arguments: argparse.Namespace) -> int:
    write_log(arguments.log_format)
    connection_file = arguments.connection_file or arguments.runs_dir / "connection.json"
    options = options_of(arguments)
    with metered(arguments) as meters:
        return run_daemon(
            arguments.listen,
            connection_file,
            arguments.runs_dir,
            options,
            address=arguments.address,
            keep_keys=arguments.keep_keys,
            insecure=arguments.insecure,
            meters=meters,
            frames=arguments.frames,
            on_verdict=arguments.on_verdict,
            archive=archive_of(arguments),
        )


def add_collector_options(parser: argparse.ArgumentParser, listen: str | None, listen_help: str) -> None:
    parser.add_argument("--listen", metavar="tcp://HOST:PORT", default=types.env("listen", listen), help=listen_help)
    parser.add_argument(
        "--address",
        metavar="tcp://HOST:PORT",
        default=types.env("address", None),
        help="address that ranks connect to, if it is another one: a service's, or this host's on a faster network; "
        "port 0 stands for the port of --listen (default: this host's name and the port of --listen)",
    )
    parser.add_argument(
        "--connection-file",
        metavar="PATH",
        type=Path,
        default=types.env("connection_file", None),
        help="file with the address and the keys for the ranks (default: RUNS_DIR/connection.json; of run: a private file)",
    )
    types.add_runs_dir(parser)
    defaults = Options()
    for name, text in (
        ("heartbeat", "seconds between heartbeats; a rank that misses three is lost"),
        ("decision-window", "seconds for which a verdict waits for ranks that have not answered"),
        ("abort-grace", "seconds after an abort until a rank that has not ended is killed"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        types.add_option(
            parser,
            f"--{name}",
            metavar="SECONDS",
            type=types.seconds,
            default=types.env(name, str(default)),
            help=f"{text} (default: {default:g})",
        )
    parser.add_argument(
        "--on-lost",
        metavar="{abort,wait}",
        type=types.on_lost,
        default=types.env("on_lost", "abort"),
        help="what the other ranks do when a rank fails or is lost (default: abort)",
    )
    types.add_option(
        parser,
        "--hold-limit",
        metavar="SECONDS",
        type=types.seconds_or_never,
        default=types.env("hold_limit", str(defaults.hold_limit)),
        help="seconds for which an abort waits for a rank in rankwatch.hold(), a save say, before the grace begins; 0: it does "
        f"not (default: {defaults.hold_limit:g})",
    )
    types.add_option(
        parser,
        "--stall-after",
        metavar="SECONDS",
        type=types.seconds_or_never,
        default=types.env("stall_after", str(defaults.stall_after)),
        help=f"seconds without progress after which a rank has stalled; 0: never (default: {defaults.stall_after:g})",
    )
    types.add_option(
        parser,
        "--on-stall",
        metavar="{warn,abort}",
        type=types.on_stall,
        default=types.env("on_stall", "warn"),
        help="what to do when a rank has stalled (default: warn, in the log and the report)",
    )
    types.add_option(
        parser,
        "--on-desync",
        metavar="{note,abort}",
        type=types.on_desync,
        default=types.env("on_desync", "note"),
        help="what to do when replicas that DDP, HSDP or a DTensor keeps equal differ (default: note, in the log and the report)",
    )
    types.add_option(
        parser,
        "--every",
        metavar="K",
        type=types.whole("K", 1, wire.MAX_EVERY),
        help="measure each K-th batch only, whatever the ranks' own option says (default: the ranks' own option)",
    )
    types.add_option(
        parser,
        "--on-verdict",
        metavar="CMD",
        default=types.env("on_verdict", ""),
        help="shell command for a run that did not finish well, and for a stall or desync in one that goes on: it has "
        "JSON on stdin, and 30 seconds",
    )
    types.add_option(
        parser,
        "--log-format",
        metavar="{text,json}",
        type=types.log_format,
        default=types.env("log_format", "text"),
        help="the lines on stderr: text with time and level, or one JSON object a line (default: text)",
    )
    parser.add_argument(
        "--archive",
        metavar="URL",
        default=types.env("archive", ""),
        help="add each run that is over to this archive, for rankwatch fleet: a folder, or a URL such as s3://bucket/runs",
    )
    parser.add_argument(
        "--frames",
        metavar="N",
        type=types.whole("N", 1, 1 << 31),
        default=types.env("frames", str(FRAMES_ON_SCREEN)),
        help=f"print the last N frames above a verdict; the record has all (default: {FRAMES_ON_SCREEN})",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST]:PORT",
        type=types.listening,
        default=types.env("metrics", None),
        help="serve metrics for Prometheus at this address; without HOST on this machine alone, with * on all interfaces",
    )
    types.add_option(parser, "--metrics-per-rank", action="store_true", help="serve metrics of each rank, too")


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


def archive_of(arguments: argparse.Namespace) -> str:
    """The URL of ``--archive``; empty: none. Raises UsageError where it cannot work: the end of a run is a bad time to say so."""
    url: str = arguments.archive
    if url:
        check_archive(url)
    return url


def options_of(arguments: argparse.Namespace) -> Options:
    return Options(
        heartbeat=arguments.heartbeat,
        decision_window=arguments.decision_window,
        abort_grace=arguments.abort_grace,
        hold_limit=arguments.hold_limit,
        abort_on_lost=arguments.on_lost == "abort",
        stall_after=arguments.stall_after,
        abort_on_stall=arguments.on_stall == "abort",
        abort_on_desync=arguments.on_desync == "abort",
        every=arguments.every,
    )
