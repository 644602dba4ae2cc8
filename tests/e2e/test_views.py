"""The views of real runs."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import commands
from browser import served
from commands import printed as rankwatch
from e2e.ended import Ended
from jobs import RANKWATCH, Job, environment
from terminals import Pty

pytestmark = pytest.mark.e2e


def test_a_run_in_one_file(bad: Job, tmp_path: Path) -> None:
    run, file = str(bad.run_dir), tmp_path / "run.html"
    rankwatch("report", run, "--html", str(file))
    body = file.read_text()
    assert "<title>rankwatch: bad-0</title>" in body
    assert "blocks.2.square" in body
    file.write_text("mine")
    again = commands.run("report", run, "--html", str(file))
    assert (again.returncode, "exists: name another file, or replace it by --overwrite" in again.stderr) == (2, True)
    assert file.read_text() == "mine"
    rankwatch("report", run, "--html", str(file), "--overwrite")
    assert file.read_text() == body
    refused = commands.run("report", run, "--html", str(tmp_path))
    assert (refused.returncode, "Is a directory" in refused.stderr) == (2, True)
    refused = commands.run("report", run, "--overwrite")
    assert (refused.returncode, "--overwrite goes with --html" in refused.stderr) == (2, True)


@pytest.mark.parametrize(("answer", "is_replaced"), [(b"y\n", True), (b"\n", False), (b"\x04", False), (b"", False)])
def test_on_a_terminal_it_asks_before_it_replaces_a_file(bad: Job, tmp_path: Path, answer: bytes, is_replaced: bool) -> None:
    file = tmp_path / "run.html"
    file.write_text("mine")
    with closing(Pty([*RANKWATCH, "report", str(bad.run_dir), "--html", str(file)], environment())) as terminal:
        terminal.await_bytes(b"run.html exists: replace it? [y/N] ")
        if answer:
            terminal.press(answer)
        else:
            terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == (0 if is_replaced else 2)
        assert b"Traceback" not in terminal.seen
    assert (file.read_text() == "mine") is not is_replaced


def test_diff(good: Job) -> None:
    run = str(good.run_dir)
    ranks = rankwatch("diff", run, "--rank", "0", "--rank", "1")
    assert "left       rank 0, batch 11 of good-0" in ranks
    assert "right      rank 1, batch 11 of good-0" in ranks
    same = json.loads(rankwatch("diff", run, run, "--json"))
    assert (same["first"], same["largest"]) == (None, [])
    assert same["frames"]["left"] == same["frames"]["right"] > 4
    assert "batch 3 of good-0" in rankwatch("diff", run, "--batch", "3", "--batch", "4")


def test_the_record_as_json_lines(bad: Job) -> None:
    lines = [json.loads(line) for line in rankwatch("export", "--jsonl", str(bad.run_dir), "--frames").splitlines()]
    kinds = [line["kind"] for line in lines if line["what"] == "event"]
    assert kinds[0] == "opened"
    assert kinds[-1] == "closed"
    assert {"hello", "tripped", "decided"} <= set(kinds)
    (tripped,) = [line for line in lines if line.get("kind") == "tripped"]
    assert tripped["rank"] == bad.verdict["rank"] == 1
    command = f"{' '.join(RANKWATCH)} export --jsonl {bad.run_dir} --frames | head -1"
    head = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment(), check=True)
    assert (len(head.stdout.splitlines()), head.stderr) == (1, "")
    recorded = {(line["rank"], line["batch"]) for line in lines if line["what"] == "batch"}
    assert recorded >= {(rank, batch) for rank in range(4) for batch in range(5)}


@pytest.mark.usefixtures("bad", "good")
def test_a_list_of_runs_and_the_report_of_one_whose_report_is_gone(ended: Ended, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(ended.runs, runs, symlinks=True)
    lines = rankwatch("list", str(runs)).splitlines()
    assert lines[0].split() == ["run", "state", "ranks", "batches", "why"]
    assert [line.split()[:4] for line in lines[1:]] == [["bad-0", "aborted", "4", "6"], ["good-0", "finished", "4", "12"]]
    assert "rank 1 of 4" in lines[1]
    told = json.loads(rankwatch("list", str(runs), "--json"))
    assert [(run["run"], run["outcome"], run["is_over"]) for run in told] == [
        ("bad-0", "aborted", True),
        ("good-0", "finished", True),
    ]
    written = (runs / "bad-0" / "report.json").read_text()
    for name in ("report.txt", "report.json"):
        (runs / "bad-0" / name).unlink()
    again = json.loads(rankwatch("report", str(runs / "bad-0"), "--json"))  # from the record
    before = json.loads(written)
    assert again["verdict"]["closeup_text"].pop("replay") == f"rankwatch replay {runs / 'bad-0'}"  # it is elsewhere now
    del before["verdict"]["closeup_text"]["replay"]
    assert again["verdict"] == before["verdict"]
    assert "first inf in run bad-0" in rankwatch("report", str(runs / "bad-0"))


def test_one_rank_and_one_batch_from_near(bad: Job) -> None:
    run = str(bad.run_dir)

    def asked(*options: str) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(rankwatch("report", run, *options, "--json"), parse_constant=pytest.fail)
        return parsed

    frames = [json.loads(line) for line in rankwatch("export", "--jsonl", run, "--frames").splitlines()]
    sent = [
        of["frame"] for of in frames if of["what"] == "frame" and (of["rank"], of["frame"]["position"]["batch"]) == (0, 3)
    ]
    batch = asked("--batch", "3", "--rank", "0")
    assert [frame["module"] for frame in batch["frames"]] == [frame["spec"]["module"] for frame in sent]
    assert [[r["abs_max"] for r in frame["readings"]] for frame in batch["frames"]] == [frame["abs_max"] for frame in sent]
    assert "*** Starting batch number=3 ***" in rankwatch("report", run, "--batch", "3", "--rank", "0")
    assert len(asked("--batch", "3", "--frames", "2")["frames"]) == 2

    culprit = asked("--batch", "5")  # the culprit never sent this batch; its trip contains the batch
    assert (culprit["rank"], culprit["digests"]) == (1, [])
    assert culprit["frames"][-1]["readings"][-1]["state"] == "inf"
    assert culprit["frames"] == [frame for frame in asked()["frames"] if frame["batch"] == 5]

    rank = asked("--rank", "1")
    assert (rank["state"], rank["trip"]["module"]) == ("aborted", "blocks.2.square")
    assert rank["batches_as_sent"] == [0, 1, 2, 3, 4]
    assert "the culprit, batch 5" in rankwatch("report", run, "--rank", "1")
    assert asked("--rank", "0")["trip"] is None

    written, short = rankwatch("report", run, "--all"), rankwatch("report", run, "--frames", "1")
    assert written == (Path(run) / "report.txt").read_text()
    assert short.rsplit("\n\n", 1)[1] == written.rsplit("\n\n", 1)[1]
    assert "Last 1 forward frames:\n" in short
    assert len(short) < len(written)
    assert asked("--frames", "1")["frames"] == asked()["frames"][-1:]


def test_every_view_of_a_run_of_four_ranks(bad: Job, tmp_path: Path) -> None:
    run = str(bad.run_dir)
    assert bad.verdict["rank"] == 1
    whole = (bad.run_dir / "report.txt").read_text()
    assert rankwatch("report", run, "--all") == whole
    assert "rank 3 of 4" in rankwatch("report", run, "--rank", "3")
    assert "batch 4 of rank 3 of 4" in rankwatch("report", run, "--rank", "3", "--batch", "4")
    assert "right      rank 3, batch" in rankwatch("diff", run, "--rank", "2", "--rank", "3")
    dumped = [json.loads(line) for line in rankwatch("export", "--jsonl", run).splitlines()]
    assert {line["rank"] for line in dumped if line["what"] == "batch"} == {0, 1, 2, 3}
    shown = rankwatch("top", run, "--once")
    assert "4 ranks on 1 node" in shown
    assert "first inf in run bad-0" in shown
    rankwatch("export", run, "--parquet", str(tmp_path / "readings.parquet"))
    rankwatch("export", run, "--tensorboard", str(tmp_path / "scalars"))
    assert (tmp_path / "readings.parquet").stat().st_size > 1000
    assert list((tmp_path / "scalars").iterdir())
    rankwatch("report", run, "--html", str(tmp_path / "run.html"))
    with served(bad.run_dir.parent) as url:
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(url).close()
        with opener.open(f"{url.partition('?')[0]}api/run/bad-0/overview") as answer:
            overview = json.load(answer)
    assert overview["grid"]["rows"] == ["0", "1", "2", "3"]
    assert overview["report"]["verdict"] == bad.verdict
