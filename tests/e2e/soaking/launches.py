"""Launches by torchrun's real agents: ranks die before they watch, nodes come, go and are replaced, a store is gone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from e2e.soaking.part import Part
from jobs import SCRIPTS, run_job

WAYS = ("c10d", "given", "alone", "static", "more", "replaced", "gone", "scaled")
"""See ``rounds.py``."""


def launch(folder: Path, how: str) -> None:
    """Launches twice. In the second launch, what goes bad on one rank stops all ranks, and no other launch has the verdict."""
    run_job(folder, [sys.executable, str(SCRIPTS / "rounds.py"), how, str(folder)], "--job", "train")
    runs = [path for path in (folder / "runs").glob("train-*") if not path.is_symlink()]
    verdicts = [
        verdict for path in runs if (verdict := json.loads((path / "report.json").read_text())["verdict"]) is not None
    ]
    told = {(verdict["rank"], verdict["certainty"], len(verdict["missing_ranks"])) for verdict in verdicts}
    assert told == {(1, "complete", 0)}
    assert list(folder.glob("trained-*")) == []


class Launches(Part):
    def round(self) -> None:
        how = self.random.choice(WAYS)
        self.counts[how] += 1
        (folder := self.folder / str(self.rounds)).mkdir()
        launch(folder, how)
