"""Signals to a training under ``rankwatch run``, in any order: each arrives once, and the training saves and ends well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from collectors import PATIENCE, until
from e2e.soaking.part import Part
from jobs import RANKWATCH, SCRIPTS, environment

SENT = (signal.SIGQUIT, signal.SIGWINCH, signal.SIGCONT, signal.SIGRTMIN, signal.SIGRTMIN + 5, signal.SIGRTMAX)
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Upon which the command is sent SIGTERM. At most one of them: a second one kills a command that goes on."""

LAST = (signal.SIGUSR1, signal.SIGUSR2)
"""Upon which the training saves, and ends."""


class Signals(Part):
    def begin(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def round(self) -> None:
        (folder := self.folder / str(self.rounds)).mkdir()
        command = [
            *("env", "--default-signal"),  # a shell has its background commands ignore SIGQUIT, nohup SIGHUP
            *RANKWATCH,
            "run",
            "--runs-dir",
            str(folder / "runs"),
            "--",
            sys.executable,
            str(SCRIPTS / "signalled.py"),
        ]
        with (folder / "log").open("w") as log:
            process = self.process = subprocess.Popen(
                [*command, str(folder)], env=environment(), stdout=log, stderr=log, start_new_session=True
            )
        until((folder / "trains").exists)
        asked = self.random.sample(ENDING, self.random.randint(0, 1))
        sent = [*asked, *self.random.sample(SENT, self.random.randint(0, len(SENT)))]
        self.random.shuffle(sent)
        sent.append(self.random.choice(LAST))
        got = folder / "signals-0"
        for count, number in enumerate(sent, 1):
            is_to_all = number not in ENDING and self.random.random() < 0.5
            self.counts[f"{signal.Signals(number).name if number < signal.SIGRTMIN else 'real time'}"] += 1
            (os.killpg if is_to_all else os.kill)(process.pid, number)
            until(partial(_has_lines, got, count))
        assert process.wait(PATIENCE) == 0, (folder / "log").read_text()
        came = list(map(int, got.read_text().split()))
        meant = [int(signal.SIGTERM if number in ENDING else number) for number in sent]
        assert came == meant, f"{came}, and not {meant}"
        assert (folder / "saved.pt").exists()
        report = json.loads((folder / "runs" / "latest" / "report.json").read_text())
        assert (report["outcome"], report["verdict"]) == ("aborted" if asked else "finished", None), report["reason"]

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _has_lines(file: Path, count: int) -> bool:
    return file.exists() and len(file.read_text().split()) >= count
