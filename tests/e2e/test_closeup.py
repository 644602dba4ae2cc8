"""The close-up of a real job of two ranks: operator, line of the user's script, recurrence and precision, in every form."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from commands import printed as rankwatch
from jobs import SCRIPTS, Job, forked, run_job, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCRIPT = SCRIPTS / "closeups.py"


def line_of(what: str) -> tuple[int, str]:
    """The number and the text of the line that goes bad."""
    lines = SCRIPT.read_text().splitlines()
    return next((number, line.strip()) for number, line in enumerate(lines, 1) if line.endswith(f"# {what}"))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(tmp_path_factory.mktemp("half"), torchrun("closeups.py", "half"))


def test_the_report_for_programs_names_operator_and_line(half: Job) -> None:
    assert half.code == 77, half.stderr
    verdict, closeup = half.verdict, half.verdict["closeup"]
    assert (verdict["rank"], verdict["batch"], verdict["module"]) == (1, 5, "1")
    assert (verdict["cause"], verdict["certainty"]) == ("overflow", "complete")
    number, text = line_of("half")
    assert closeup["source"] == {"file": str(SCRIPT), "line": number, "function": "product", "text": text}
    assert closeup["operator"] == "aten.mm.default"
    assert [(one["shape"], one["dtype"]) for one in closeup["inputs"]] == [([16, 8], "float16"), ([8, 16], "float16")]
    assert all(one["abs_max"] <= 200 for one in closeup["inputs"])
    assert (closeup["recurred"], closeup["of"], closeup["eager"]) == (3, 3, False)
    for dtype in ("float32", "float64"):
        assert closeup["precision"][dtype]["state"] == "finite"
        assert 65504 < closeup["precision"][dtype]["abs_max"] < 8 * 200 * 200
    assert half.left_behind == []


def test_the_report_for_people_is_whole_on_disk_and_short_on_the_terminal(half: Job) -> None:
    report = (half.run_dir / "report.txt").read_text()
    frames, head = report.rstrip("\n").rsplit("\n\n", 1)
    assert frames.startswith("Detected inf/nan during batch_number=")
    titles = [line[2:12].strip() for line in head.splitlines()[1:] if line[2:12].strip()]
    assert titles[:6] == ["culprit", "operator", "cause", "try", "recurs", "precision"]
    number, text = line_of("half")
    assert f"  operator   aten.mm at {SCRIPT}:{number}, in product: {text}\n" in report
    assert "  recurs     recurred 3 of 3\n" in report
    assert "  precision  finite in float32 and float64: " in report
    # The verdict is the last thing on the terminal, and with it the way to the record.
    on_screen = half.stdout.rstrip("\n").rsplit("\n\n", 1)[1]
    assert on_screen.splitlines()[0] == head.splitlines()[0]
    assert "recurs " not in on_screen
    assert on_screen.endswith(f"\n  record     rankwatch report {half.run_dir} --all")
    assert rankwatch("report", str(half.run_dir)).rstrip("\n").rsplit("\n\n", 1)[1] == on_screen
    assert rankwatch("report", str(half.run_dir), "--all") == report


def test_the_events_the_rank_and_the_file_have_it_too(half: Job, tmp_path: Path) -> None:
    number, _ = line_of("half")
    at = f"aten.mm at {SCRIPT}:{number}, in product"
    with closing(sqlite3.connect(half.run_dir / "run.db")) as record:
        found = record.execute("SELECT rank FROM events WHERE kind = 'lookedcloser'").fetchall()
    assert found == [(1,)]
    assert at in rankwatch("report", str(half.run_dir), "--rank", "1")
    of_rank = json.loads(rankwatch("report", str(half.run_dir), "--rank", "1", "--json"))
    assert of_rank["closeup"] == half.verdict["closeup"]
    rankwatch("report", str(half.run_dir), "--html", str(tmp_path / "run.html"))
    assert at in (tmp_path / "run.html").read_text()


def test_the_last_line_replays_the_capsule_and_says_the_same(half: Job) -> None:
    lines = (half.run_dir / "report.txt").read_text().splitlines()
    assert lines[-1] == f"  replay     rankwatch replay {half.run_dir}"
    capsule = half.run_dir / half.verdict["capsule"]
    assert {one.name for one in capsule.iterdir()} >= {"capsule.json", "tensors.safetensors", "SHA256SUMS"}
    assert all(one.stat().st_mode & 0o077 == 0 for one in (capsule, *capsule.iterdir()))
    replayed = rankwatch("replay", str(half.run_dir))
    number, text = line_of("half")
    assert f"  operator   aten.mm at {SCRIPT}:{number}, in product: {text}\n" in replayed
    assert "  recurs     3 of 3, the same bits each time, the bits of the training\n" in replayed
    highest = half.verdict["closeup"]["precision"]["float32"]["abs_max"]
    assert re.search(rf"float32 +{re.escape(f'{highest:.2e}')}\n", replayed)  # as the close-up found it


def test_the_others_do_not_wait_for_it(half: Job) -> None:
    with closing(sqlite3.connect(half.run_dir / "run.db")) as record:
        kinds = [kind for (kind,) in record.execute("SELECT kind FROM events ORDER BY id")]
    assert kinds.index("tripped") < kinds.index("decided") < kinds.index("lookedcloser")


def test_a_fault_that_does_not_recur_is_the_machines(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("closeups.py", "once"))
    assert job.code == 77, job.stderr
    assert (job.verdict["rank"], job.verdict["cause"]) == (1, "unexplained")
    closeup = job.verdict["closeup"]
    assert (closeup["operator"], closeup["recurred"], closeup["of"]) == (None, 0, 3)
    host = job.verdict["host"]
    assert closeup["machine"].startswith(host)
    assert f"  try        train on without {host}; " in job.stdout
    assert "what never recurs is the hardware's" in job.verdict["try"]
    assert f"  recurs     did not recur: suspect the hardware of {host}" in rankwatch("report", str(job.run_dir), "--all")


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("closeups.py", "half"), env={"RANKWATCH_CLOSEUP": "0"})
    assert job.code == 77, job.stderr
    closeup = job.verdict["closeup"]  # the operator is the trip's own
    assert (closeup["operator"], closeup["source"]["line"]) == ("aten.mm.default", line_of("half")[0])
    assert closeup["recurred"] is None
    assert (closeup["precision"], closeup["note"], job.verdict["capsule"]) == ({}, "", None)
