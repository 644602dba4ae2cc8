"""``rankwatch run``: a private collector around one command, and the report at its end."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from rankwatch.attach import attached
from rankwatch.errors import EXIT_ABORTED, UsageError
from rankwatch.shared.system.log_lines import is_json
from rankwatch.shared.system.on_terminal import as_shown
from rankwatch.shared.system.resources import lack

from ..decide.core.report import Outcome, Report
from ..decide.next.next_action import variables
from ..decide.next.restarts import Restarts
from ..views import text
from .collector import Collector, raise_descriptor_limit
from .files.run_folder import RunsFolder
from .metrics.meters import Meters
from .printer import Printer, is_terminal, write
from .processes.archiver import Archiver
from .processes.notifier import Notifier
from .processes.signals import Bystander, Part, heeded, part_of
from .settings import Settings
from .status import Status

log = logging.getLogger(__name__)

LISTEN = "tcp://127.0.0.1:0"
"""Where the collector of a command listens: at a free port of this machine alone."""


def run_command(
    command: Sequence[str],
    settings: Settings,
    environ: Mapping[str, str],
    *,
    meters: Meters | None = None,
    status: bool = True,
    config: str | None = None,
    max_restarts: int = 0,
) -> int:
    """Runs ``command`` under its own collector; returns 77 when the run stopped its ranks, else the exit code of the command.

    Args:
        status: whether a line shows the state of the run, where stderr is a terminal.
        config: a file with options for the ranks.
        max_restarts: how often the command is started again at most, where that helps.

    Raises:
        UsageError: there is no such command, an option of the ranks is wrong, or the collector cannot start.
    """
    if lack():
        raise_descriptor_limit()
    if why := lack():
        _go_unwatched(command, why)
    # Then whoever has it was started by the command, with or without RANKWATCH_LAUNCH.
    is_private = settings.connection_file is None
    try:
        folder = RunsFolder(settings.runs_dir, points_latest=is_private)
        private = tempfile.TemporaryDirectory(prefix="rankwatch-")
    except OSError as error:
        _go_unwatched(command, str(error))
    except UsageError as error:
        try:
            folder = RunsFolder(Path(tempfile.mkdtemp(prefix="rankwatch-runs-")), points_latest=is_private)
            private = tempfile.TemporaryDirectory(prefix="rankwatch-")
        except (OSError, UsageError):
            _go_unwatched(command, str(error))
        log.warning("%s; the run is recorded in %s", error, folder.path)
        settings = replace(settings, runs_dir=folder.path)
    is_shown = status and is_terminal(sys.stderr) and not is_json()
    env = dict(environ)
    env.pop("RANKWATCH_SEAT", None)  # a command that a rank runs under a collector of its own has ranks of its own
    restarts = Restarts(max_restarts)
    with private as hidden:
        settings = replace(settings, job=settings.job or env.get("RANKWATCH_JOB") or job_name(command, env))
        while True:
            env["RANKWATCH_RESTART"] = str(restarts.count)
            ended = _run_once(command, settings, attached(env, config), folder, Path(hidden), meters, is_shown=is_shown)
            then = restarts.after(*ended)
            if then.text:
                log.warning("%s", then.text)
            if not then.again:
                return ended.code
            env.update(variables(then.advice))


class CommandEnd(NamedTuple):
    """How the command has ended: with which exit code of ours, by which signal to us, and the last run of each of its models."""

    code: int
    signal: str
    runs: Sequence[Report]


def _run_once(
    command: Sequence[str],
    settings: Settings,
    environ: Mapping[str, str],
    folder: RunsFolder,
    hidden: Path,
    meters: Meters | None,
    *,
    is_shown: bool,
) -> CommandEnd:
    """Runs the command once, under a collector of its own. ``hidden``: a folder for the keys that nobody else is given."""
    is_private = settings.connection_file is None
    env = dict(environ)
    launch = env["RANKWATCH_LAUNCH"] = os.urandom(8).hex()
    reports: dict[str, Report] = {}
    stopped: list[str] = []
    notifier, archiver = Notifier(settings.on_verdict), Archiver(settings.archive, settings.runs_dir)

    def show(report: Report, news: bool) -> None:
        reports[report.run] = report
        if news:
            notifier.tell(report)

    with ExitStack() as signals:  # until the report is written
        signals.callback(notifier.stop)
        signals.callback(archiver.stop)
        with (
            Printer(is_shared=not is_json()) as printer,
            Status(settings.runs_dir, printer.show) as line,
        ):
            path = settings.connection_file or hidden / "connection.json"
            options = replace(settings.options, expects_job_end=True, launch="" if is_private else launch)
            collector = Collector(
                replace(settings, options=options),
                path,
                folder,
                show,
                show_ranks=line.show if is_shown else lambda shown: None,
                alert=notifier.alert,
                meters=meters,
                archiver=archiver,
            )
            try:
                env["RANKWATCH_CONNECTION"] = str(path.absolute())
                env.setdefault("RANKWATCH_JOB", collector.connection.job)
                code = _run_beside(collector, command, env, signals, stopped)
            finally:
                collector.close()
        last = _conclude(collector, reports, code, settings)
        notifier.close()
        archiver.close()
    aborted = any(report.stops_ranks for report in last)
    return CommandEnd(EXIT_ABORTED if aborted else code, "".join(stopped[:1]), last)


def _go_unwatched(command: Sequence[str], why: str) -> NoReturn:
    log.warning("no collector can start: %s; the command runs unwatched", why)
    replace_by(command)


def replace_by(command: Sequence[str]) -> NoReturn:
    """Replaces this process by the command, unwatched. Raises UsageError when there is no such command."""
    command = _found(command, os.environ)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise UsageError(f"cannot run {shlex.join(command)}: {error.strerror}") from None


def _found(command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The command; a program that PATH does not have, such as torchrun, is looked for beside our own interpreter."""
    name, *rest = command
    beside = Path(sys.executable).parent / name
    if "/" in name or shutil.which(name, path=env.get("PATH")):
        return [name, *rest]
    if beside.is_file() and os.access(beside, os.X_OK):
        return [str(beside), *rest]
    raise UsageError(f"cannot run {shlex.join(command)}: there is no program {name!r} in PATH, nor beside {sys.executable}")


_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "env", "exec", "cd", "source", "time", "nohup")
"""Programs, and words of a shell, that run something else."""


def job_name(command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """The job's name: the script's without its ending, or the module's after ``-m``, or the program's.

    A shell says nothing of what it runs: behind one, it is the name of SLURM's job, else what the shell's command line runs, else
    the shell script's.
    """
    env = os.environ if environ is None else environ
    is_shell = Path(command[0]).name in _SHELLS
    named = env.get("SLURM_JOB_NAME", "") if is_shell else ""
    if named and named not in (*_SHELLS, "interactive", "wrap"):
        return named
    words = [part for word in command for part in (_words(word) if is_shell else [word])]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.endswith(".py"):
            return Path(word).stem
        if word in ("-m", "--module") and following and not following.startswith(("torch.distributed", "rankwatch.attach")):
            return following.rpartition(".")[2]
    programs = [word for word in words[1:] if is_shell and not word.startswith("-") and "=" not in word]
    return next((Path(word).stem for word in programs if Path(word).name not in _SHELLS), Path(command[0]).name)


def _words(text: str) -> list[str]:
    """Those of a shell's command line; one that the shell alone understands is a word."""
    try:
        words = shlex.shlex(text, posix=True, punctuation_chars=True)  # "rank.py;" is a script and a semicolon
        words.whitespace_split = True
        return [word for word in words if word[:1] not in ("", *";&|<>()")] or [text]
    except ValueError:
        return text.split()


def _run_beside(
    collector: Collector, command: Sequence[str], env: Mapping[str, str], signals: ExitStack, stopped: list[str]
) -> int:
    """Serves while the command runs; returns its exit code: 128 + n after signal n, as in a shell.

    Args:
        signals: is given what ends the handling of signals. One that comes late must not cost the record or the report.
        stopped: is given the names of the signals.
    """
    # The handlers are set before the child starts: a SIGTERM in between must not leave the child behind.
    child: subprocess.Popen[bytes] | None = None
    interrupted, early = "", list[int]()
    is_over = False

    def end(number: int) -> None:
        nonlocal interrupted
        stopped.append(signal.Signals(number).name)
        if is_over:
            signals.close()  # the next one ends this process, wherever it is: the reader of stdout may be what hangs
            return
        repeated, interrupted = interrupted, stopped[-1]
        collector.interrupt(interrupted)
        if child is None:
            return
        if child.returncode is not None:
            collector.give_up()
        elif repeated:
            child.kill()
        elif number != signal.SIGINT:  # which the terminal sends to the child too
            child.terminate()

    def take(number: int, frame: FrameType | None) -> None:
        if part_of(number) is Part.ENDS:
            end(number)
        elif child is None:
            early.append(number)
        elif not bystander.has_seen(number):
            child.send_signal(number)

    numbers = heeded()
    bystander = Bystander(number for number in numbers if part_of(number) is Part.PASSED_ON)
    signals.callback(bystander.close)
    for number in numbers:
        signals.callback(signal.signal, number, signal.signal(number, take))
    command = _found(command, env)
    try:
        child = subprocess.Popen(command, env=dict(env))
    except OSError as error:
        raise UsageError(f"cannot run {shlex.join(command)}: {error.strerror}") from None
    for number in early:
        child.send_signal(number)
    if interrupted:
        child.terminate()
    process = child

    def wait() -> None:
        code = process.wait()
        collector.exits.take_status(process.pid, code)  # the command may be a rank
        collector.stop(code, interrupted)

    threading.Thread(target=wait, name="wait-for-command", daemon=True).start()
    try:
        collector.serve()
    except Exception:
        log.exception("the collector ended by an error of its own; the command goes on without it")
    code = process.wait()
    is_over = True
    return code if code >= 0 else 128 - code


def _describe_unseen(code: int) -> str:
    """A line where no rank connected. A command that failed has said itself why."""
    if code:
        number = code - 128
        by = f" ({signal.Signals(number).name})" if number in {one.value for one in signal.Signals} else ""
        return f"exit code {code}{by} before any rank connected, so there is no report"
    return (
        "no rank connected: the command trained no model; or its Python has no rankwatch, or was not given PYTHONPATH and "
        "RANKWATCH_* (python -I and -E leave them out, and so does sudo); or it ran as another user"
    )


def _conclude(collector: Collector, reports: Mapping[str, Report], code: int, settings: Settings) -> list[Report]:
    """Prints the reports; returns those that say how the command went, the last one of each model."""
    if not any(run.is_own for run in collector.ledger.runs.values()):
        log.warning("%s", _describe_unseen(code))
    # The report comes last, below whatever the dying processes printed; and of several the one with a verdict.
    for report in sorted(reports.values(), key=lambda one: one.verdict is not None):
        stream, before = (sys.stderr, "") if report.outcome is Outcome.FINISHED else (sys.stdout, "\n")
        record = text.command_of(settings.runs_dir / report.run)
        said = text.render(report, settings.frames, record)
        if stream is sys.stderr and is_json():
            log.info("%s", said.rstrip())
        else:
            write(stream, before + as_shown(said, stream))
    # Where a job was restarted, by torchrun's --max-restarts say, its last run decides. "Last" is the run that
    # began last: a script that trains twice may begin the second run before the first has ended on all ranks.
    began = {run: number for number, run in enumerate(collector.ledger.runs)}
    # Ranks that another command started report here too, where they have the connection file.
    own = [report for report in reports.values() if report.is_own]
    last = {(report.job, report.model): report for report in sorted(own, key=lambda report: began.get(report.run, -1))}
    return list(last.values())
