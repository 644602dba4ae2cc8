"""The command line: ``rankwatch collector | run | tune | report | demo``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rankwatch import __version__, wire
from rankwatch import connection as connections
from rankwatch.errors import EXIT_ABORTED, EXIT_ERROR, EXIT_USAGE, RankwatchError, UsageError
from rankwatch.text import describe_tuning

from . import arguments as types
from . import control, sides, snapshot, store
from .collector import DEFAULT_LISTEN, run_daemon
from .demo import run_demo
from .diff import compare
from .launcher import run_command
from .report import diff, dump, json, runs
from .report import text as texts
from .run import Options
from .store import StoreError

EPILOG = f"""\
exit codes: 0 fine; {EXIT_ERROR} error; {EXIT_USAGE} usage; {EXIT_ABORTED} a verdict was reached, the training aborted.
Options are also read from RANKWATCH_<OPTION>, such as RANKWATCH_RUNS_DIR."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="rankwatch: %(message)s")
    try:
        code: int = arguments.function(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # its reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RankwatchError as error:
        sys.stderr.write(f"rankwatch: error: {error}\n")
        return error.exit_code
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankwatch",
        description="Finds the first inf/nan of a distributed PyTorch training, and stops every rank.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rankwatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    collector = commands.add_parser("collector", help="collect from the ranks of any number of runs, until SIGTERM")
    _add_collector_options(collector, None, f"address to listen on (default: {DEFAULT_LISTEN}; port 0 picks one)")
    collector.add_argument(
        "--insecure", action="store_true", help="links in plain text, to look at them with tcpdump; on loopback alone"
    )
    collector.set_defaults(function=_collector)

    run = commands.add_parser("run", help="run a command under a collector of its own")
    _add_collector_options(run, "tcp://127.0.0.1:0", "address to listen on (default: a free port of this machine alone)")
    run.add_argument("--job", help="name of the run (default: the script's)")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] CMD ...", help="the command, such as torchrun ...")
    run.set_defaults(function=_run)

    _add_tune(commands.add_parser("tune", help="change options of the ranks while they train"))

    _add_invite(commands.add_parser("invite", help="make a connection file that speaks for one job alone"))

    report = commands.add_parser("report", help="print the report of a run again")
    report.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=Path(types.env("runs_dir", "rankwatch-runs") or "", "latest"),
        metavar="RUN_DIR",
        help="the run's folder (default: rankwatch-runs/latest)",
    )
    report.add_argument("--json", action="store_true", help="as JSON")
    report.set_defaults(function=_report)

    _add_diff(
        commands.add_parser("diff", help="two batches side by side: of two ranks, of two runs, or one after the other")
    )

    listed = commands.add_parser("list", help="the runs in a folder, and how they ended")
    listed.add_argument(
        "runs_dir",
        type=Path,
        nargs="?",
        default=types.env("runs_dir", "rankwatch-runs"),
        metavar="RUNS_DIR",
        help="where runs are recorded (default: rankwatch-runs)",
    )
    listed.add_argument("--json", action="store_true", help="as JSON")
    listed.set_defaults(function=_list)

    dumped = commands.add_parser("dump", help="the record of a run as JSON lines")
    dumped.add_argument("run", type=Path, metavar="RUN_DIR", help="the run's folder")
    dumped.add_argument("--frames", action="store_true", help="also the batches as the ranks sent them, frame by frame")
    dumped.set_defaults(function=_dump)

    demo = commands.add_parser("demo", help="a real training of two ranks on the CPU that overflows on one of them")
    _add_runs_dir(demo)
    demo.set_defaults(function=_demo)
    return parser


def _add_collector_options(parser: argparse.ArgumentParser, listen: str | None, listen_help: str) -> None:
    parser.add_argument("--listen", metavar="tcp://HOST:PORT", default=types.env("listen", listen), help=listen_help)
    parser.add_argument(
        "--connection-file",
        metavar="PATH",
        type=Path,
        default=types.env("connection_file", None),
        help="where ranks find address and keys (default: RUNS_DIR/connection.json; for run: a private file)",
    )
    _add_runs_dir(parser)
    defaults = Options()
    for name, text in (
        ("heartbeat", "seconds between heartbeats; after three silent ones a rank is lost"),
        ("decision-window", "seconds that a verdict waits for ranks that have not answered"),
        ("abort-grace", "seconds from the abort to the forced end of a rank that does not come back"),
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
        help="what happens to the others when a rank fails or is lost (default: abort)",
    )
    types.add_option(
        parser,
        "--stall-after",
        metavar="SECONDS",
        type=types.seconds_or_never,
        default=types.env("stall_after", str(defaults.stall_after)),
        help=f"a rank without progress for so long has stalled; 0: never (default: {defaults.stall_after:g})",
    )
    types.add_option(
        parser,
        "--on-stall",
        metavar="{warn,abort}",
        type=types.on_stall,
        default=types.env("on_stall", "warn"),
        help="what happens when a rank has stalled (default: warn, in the log and the report)",
    )
    types.add_option(
        parser,
        "--every",
        metavar="K",
        type=types.whole("K", 1, wire.MAX_EVERY),
        default=0,
        help="ranks look at each K-th batch only, whatever they were told themselves (default: as they were told)",
    )


def _add_tune(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "An empty list ('') takes a list back. What is not given stays as it is."
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help="the run's name, such as train-0 (default: all)")
    _add_connection(parser)
    parser.add_argument(
        "--every", metavar="K", type=types.whole("K", 1, wire.MAX_EVERY), default=0, help="look at each K-th batch"
    )
    for name, text in (("modules", "modules to look at; '' for all"), ("ignore", "module or module:label that never trips")):
        parser.add_argument(f"--{name}", metavar="PATTERN,...", type=types.patterns, help=f"patterns of {text}")
    batches = {"metavar": "N,...", "type": types.batches, "help": "batches to print and record frame by frame"}
    types.add_option(parser, "--trace-batch-nums", **batches)
    parser.add_argument("--check", choices=sorted(wire.CHECKS), default="", help="when readings are looked at")
    parser.set_defaults(function=_tune)


def _add_invite(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Who has the file can neither speak for other jobs' runs nor change them."
    parser.add_argument("job", metavar="JOB", help="the name of the job; its ranks take it over")
    _add_connection(parser)
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help="where to write the connection file")
    parser.set_defaults(function=_invite)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Two runs, or two times --batch, or two times --rank; what is not given is rank 0 and the last batch kept."
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER_RUN_DIR", help="another run's folder")
    number = types.whole("N", 0, 1 << 62)
    parser.add_argument("--batch", type=number, action="append", default=[], metavar="B", help="batch, once or twice")
    parser.add_argument("--rank", type=number, action="append", default=[], metavar="R", help="rank, once or twice")
    parser.add_argument(
        "--frames", type=types.whole("N", 1, 1 << 31), default=20, metavar="N", help="how many readings to show"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, all that differ")
    parser.set_defaults(function=_diff)


def _add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connection",
        metavar="FILE",
        default=types.env("connection", None) or Path(types.env("runs_dir", "rankwatch-runs") or "", "connection.json"),
        help="the collector's connection file (default: RANKWATCH_CONNECTION, else rankwatch-runs/connection.json)",
    )


def _add_runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs-dir",
        metavar="DIR",
        type=Path,
        default=types.env("runs_dir", "rankwatch-runs"),
        help="where runs are recorded (default: rankwatch-runs)",
    )


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        heartbeat=arguments.heartbeat,
        decision_window=arguments.decision_window,
        abort_grace=arguments.abort_grace,
        abort_on_lost=arguments.on_lost == "abort",
        stall_after=arguments.stall_after,
        abort_on_stall=arguments.on_stall == "abort",
        every=arguments.every,
    )


def _collector(arguments: argparse.Namespace) -> int:
    connection_file = arguments.connection_file or arguments.runs_dir / "connection.json"
    options = _options(arguments)
    return run_daemon(arguments.listen, connection_file, arguments.runs_dir, options, insecure=arguments.insecure)


def _run(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UsageError("nothing to run: rankwatch run -- torchrun --nproc-per-node 8 train.py")
    return run_command(
        command,
        listen=arguments.listen,
        connection_file=arguments.connection_file,
        runs_dir=arguments.runs_dir,
        options=_options(arguments),
        job=arguments.job,
    )


def _tune(arguments: argparse.Namespace) -> int:
    tune = wire.Tune(
        run=arguments.run,
        every=arguments.every,
        modules=arguments.modules,
        ignore=arguments.ignore,
        trace_batch_nums=arguments.trace_batch_nums,
        check=arguments.check,
    )
    if tune.changes_nothing:
        raise UsageError("nothing to change: give --every, --modules, --ignore, --trace-batch-nums or --check")
    done = control.tune(connections.read(arguments.connection), tune)
    ranks = f"{done.ranks} rank{'s' if done.ranks != 1 else ''} of {', '.join(done.runs)}"
    sys.stdout.write(f"{ranks} told: {describe_tuning(tune)}\n")
    return 0


def _invite(arguments: argparse.Namespace) -> int:
    connection = control.invite(connections.read(arguments.connection), arguments.job)
    connections.write(connection, arguments.output)
    sys.stdout.write(f"ranks of job {arguments.job} reach the collector by RANKWATCH_CONNECTION={arguments.output}\n")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    run: Path = arguments.run
    if (run / "latest").is_dir():  # the folder of all runs: its newest is meant
        run /= "latest"
    path = run / ("report.json" if arguments.json else "report.txt")
    try:
        written = path.read_text(encoding="utf-8")
    except OSError as error:
        written = _report_so_far(run, error, as_json=arguments.json)
    sys.stdout.write(written)
    return 0


def _report_so_far(run: Path, error: OSError, *, as_json: bool) -> str:
    """What the record says of a run whose report is not written yet, or not any more."""
    try:
        report, is_over = snapshot.take(run)
    except StoreError as why:
        raise UsageError(f"no report in {run}: {error.strerror}; nor is it in its record: {why}") from None
    if as_json:
        return json.render(report)
    return texts.render(report) if is_over or report.verdict else texts.render_so_far(report)


def _list(arguments: argparse.Namespace) -> int:
    if not arguments.runs_dir.is_dir():
        raise UsageError(f"no folder {arguments.runs_dir}: give the one that runs are recorded in")
    found = snapshot.take_all(arguments.runs_dir)
    sys.stdout.write(runs.to_json(found) if arguments.json else runs.render(found))
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    folders = [arguments.run, *([arguments.other] if arguments.other else [])]
    left, right = sides.of(folders, arguments.rank or [0], arguments.batch)
    found = compare(left.frames, right.frames)
    body = diff.to_json(found, left.name, right.name) if arguments.json else ""
    sys.stdout.write(body or diff.render(found, left.name, right.name, arguments.frames))
    return 0


def _dump(arguments: argparse.Namespace) -> int:
    try:
        for line in dump.lines(arguments.run / store.FILE, frames=arguments.frames):
            sys.stdout.write(line + "\n")
    except StoreError as error:
        raise UsageError(f"{error}; is {arguments.run} a run's folder?") from None
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    return run_demo(arguments.runs_dir)


if __name__ == "__main__":
    sys.exit(main())
