"""One run of a script: its output, and what the records say of the trainings that were watched in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameworks.home import Home
from frameworks.script import Said, Script
from rankwatch_monitor.record.reader import RunRecord

FIELDS_OF_A_VERDICT = ("rank", "batch", "module", "cause")


@dataclass(frozen=True)
class Watched:
    """A training that was watched: its report, and how many modules of which root were seen."""

    began: float
    report: dict[str, Any]
    root: str
    modules: int

    def __str__(self) -> str:
        return f"{self.root}: {self.modules} modules, {self.report['batches']} batches, {self.report['outcome']}"


@dataclass(frozen=True)
class Drill:
    """A script that has ended, or was stopped: then its exit code is -9. ``errors``: the end of what went to stderr."""

    code: int
    last_line: str
    errors: str
    seconds: float
    runs: tuple[Watched, ...]

    @property
    def notices(self) -> tuple[str, ...]:
        of_all = [notice for run in self.runs for notice in (*run.report["notices"], *run.report["desync"])]
        collectives = ["collectives" for run in self.runs for _ in run.report["collectives"]]
        return (*(notice.get("kind") or notice["pattern"] for notice in of_all), *collectives)

    @property
    def said(self) -> Said:
        for number, run in enumerate(self.runs):
            if verdict := run.report["verdict"]:
                fields = {name: str(verdict[name]) for name in FIELDS_OF_A_VERDICT} | {"run": str(number)}
                return Said(fields, self.notices, run.report["reason"])
        return Said({}, self.notices, "nothing tripped")


def drill(script: Script, home: Home, work: Path, *, watched: bool, fault: bool, limit: float) -> Drill:
    """The script is copied to ``work``: beside the others, a script named after its framework would be imported as that."""
    work.mkdir(parents=True)
    shutil.copy(script.path, work / "train.py")
    command, runs = [*script.launch, str(work / "train.py")], work / "runs"
    if watched:
        command = [
            str(home.python),
            "-m",
            "rankwatch_monitor",
            "run",
            "--runs-dir",
            str(runs),
            "--no-status",
            "--",
            *command,
        ]
    environment = home.environment(**({"FAULT": "1"} if fault else {}))
    began = time.monotonic()
    with (work / "stdout").open("w") as out, (work / "stderr").open("w") as err:
        process = subprocess.Popen(command, cwd=work, env=environment, stdout=out, stderr=err)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun and rankwatch end their ranks
            process.wait()
            code = -9
    seconds = time.monotonic() - began
    last_line = (work / "stdout").read_text().strip().rpartition("\n")[2]
    return Drill(code, last_line, (work / "stderr").read_text()[-3000:], seconds, tuple(look(runs)))


def look(runs: Path) -> list[Watched]:
    """The trainings in the order in which they began."""
    folders = [path for path in runs.glob("*") if (path / "report.json").exists() and not path.is_symlink()]
    return sorted((read_run(folder) for folder in folders), key=lambda run: run.began)


def read_run(folder: Path) -> Watched:
    with RunRecord(folder / "run.db") as record:
        seen = {(spec.module, spec.module_class) for table in record.tables().values() for spec in table.specs}
        began = record.began()
    root = "+".join(sorted(kind for name, kind in seen if not name)) or "?"
    return Watched(began, json.loads((folder / "report.json").read_text()), root, len({name for name, _ in seen}))
