"""The command line: ``rankwatch collector | run | report | demo``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rankwatch import __version__
from rankwatch.errors import EXIT_ABORTED, EXIT_ERROR, EXIT_USAGE, RankwatchError, UsageError

from .collector import DEFAULT_LISTEN, run_daemon
from .demo import run_demo
from .launcher import run_command
from .run import Options

EPILOG = f"""\
exit codes: 0 fine; {EXIT_ERROR} error; {EXIT_USAGE} usage; {EXIT_ABORTED} a verdict was reached, the training aborted.
Options are also read from RANKWATCH_<OPTION>, such as RANKWATCH_RUNS_DIR."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="rankwatch: %(message)s")
    try:
        code: int = arguments.function(arguments)
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
    collector.set_defaults(function=_collector)

    run = commands.add_parser("run", help="run a command under a collector of its own")
    _add_collector_options(run, "tcp://127.0.0.1:0", "address to listen on (default: a free port of this machine alone)")
    run.add_argument("--job", help="name of the run (default: the script's)")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] CMD ...", help="the command, such as torchrun ...")
    run.set_defaults(function=_run)

    report = commands.add_parser("report", help="print the report of a run again")
    report.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=Path(_env("runs_dir", "rankwatch-runs") or "", "latest"),
        metavar="RUN_DIR",
        help="the run's folder (default: rankwatch-runs/latest)",
    )
    report.add_argument("--json", action="store_true", help="as JSON")
    report.set_defaults(function=_report)

    demo = commands.add_parser("demo", help="a real training of two ranks on the CPU that overflows on one of them")
    _add_runs_dir(demo)
    demo.set_defaults(function=_demo)
    return parser


def _add_collector_options(parser: argparse.ArgumentParser, listen: str | None, listen_help: str) -> None:
    parser.add_argument("--listen", metavar="tcp://HOST:PORT", default=_env("listen", listen), help=listen_help)
    parser.add_argument(
        "--connection-file",
        metavar="PATH",
        type=Path,
        default=_env("connection_file", None),
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
        parser.add_argument(
            *dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")),
            metavar="SECONDS",
            type=_seconds,
            default=_env(name, str(default)),
            help=f"{text} (default: {default:g})",
        )
    parser.add_argument(
        "--on-lost",
        metavar="{abort,wait}",
        type=_on_lost,
        default=_env("on_lost", "abort"),
        help="what happens to the others when a rank fails or is lost (default: abort)",
    )


def _add_runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs-dir",
        metavar="DIR",
        type=Path,
        default=_env("runs_dir", "rankwatch-runs"),
        help="where runs are recorded (default: rankwatch-runs)",
    )


def _env(option: str, default: str | None) -> str | None:
    return os.environ.get(f"RANKWATCH_{option.upper().replace('-', '_')}", default)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds") from None
    if not 0.01 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: expected 0.01 to 3600 seconds")
    return value


def _on_lost(text: str) -> str:
    # argparse checks the type of a default that comes from the environment, but not its choices.
    if text not in ("abort", "wait"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected abort or wait")
    return text


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        heartbeat=arguments.heartbeat,
        decision_window=arguments.decision_window,
        abort_grace=arguments.abort_grace,
        abort_on_lost=arguments.on_lost == "abort",
    )


def _collector(arguments: argparse.Namespace) -> int:
    connection_file = arguments.connection_file or arguments.runs_dir / "connection.json"
    return run_daemon(arguments.listen, connection_file, arguments.runs_dir, _options(arguments))


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


def _report(arguments: argparse.Namespace) -> int:
    run: Path = arguments.run
    if (run / "latest").is_dir():  # the folder of all runs: its newest is meant
        run /= "latest"
    path = run / ("report.json" if arguments.json else "report.txt")
    try:
        sys.stdout.write(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"no report in {run}: {error.strerror}; a run's report is written at its end") from None
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    return run_demo(arguments.runs_dir)


if __name__ == "__main__":
    sys.exit(main())
