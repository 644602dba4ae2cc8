"""Several collectors whose runs lie in one folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import records
from jobs import RANKWATCH, ROOT, SCRIPTS, environment
from rankwatch.shared.types import messages
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.runs import folders, read_rows
from rankwatch_monitor.record.schema import FILE

ENV = environment(PYTHONPATH=f"{ROOT / 'agent'}:{ROOT / 'monitor'}:{ROOT / 'tests'}")
NAMES = ["train-0", *(f"train-0.{number}" for number in range(2, 10))]


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_runs_of_nine_collectors_that_begin_at_one_moment_have_nine_records(tmp_path: Path, times: int) -> None:
    for time in range(times):
        folder = tmp_path / str(time)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "start_storm.py"), str(folder), "9"], env=ENV, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        runs = folder / "runs"
        assert sorted(path.name for path in runs.iterdir()) == ["latest", *NAMES]
        assert (runs / "latest").resolve().name in NAMES
        said = set()
        for run in folders(runs):
            assert sorted(path.name for path in run.iterdir()) == ["report.json", "report.txt", FILE]
            assert f"run {run.name} finished" in (run / "report.txt").read_text()
            facts = [entry.fact for entry in records.read(run / FILE, RunRecord.entries)]
            (hello,) = (fact for fact in facts if isinstance(fact, messages.Hello))
            (bye,) = (fact for fact in facts if isinstance(fact, messages.Bye))
            assert bye.text == f"of collector {hello.host.removeprefix('host-')}"
            said.add(hello.host)
        assert len(said) == 9


RANK = """
import os, zmq, makers
from rankwatch.shared.link import connection, sockets, wire
from rankwatch.shared.types import messages
rank = sockets.dealer(zmq.Context(), connection.read(os.environ["RANKWATCH_CONNECTION"]))
batch = messages.Table(makers.table()), messages.Batch(1, makers.summary(0))
for message in (makers.hello(), *batch, messages.Bye(2, "finished", "")):
    rank.send(wire.encode(message))
while not isinstance(wire.decode(rank.recv()), messages.Ack):
    pass
"""


@pytest.mark.slow
def test_nine_jobs_that_are_started_at_one_moment_have_nine_records(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    command = [*RANKWATCH, "run", "--runs-dir", str(runs), "--job", "train", "--", sys.executable, "-c", RANK]
    with open(tmp_path / "log", "w") as log:
        jobs = [subprocess.Popen(command, env=ENV, stdout=log, stderr=log) for _ in range(9)]
        assert [job.wait() for job in jobs] == [0] * 9
    assert sorted(row.run for row in read_rows(runs)) == NAMES
    assert all(row.is_over and row.batches for row in read_rows(runs))
    assert "cannot" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_collector_that_is_killed_while_it_begins_a_record_is_swept_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from rankwatch_monitor.serve.files.run_folder import RunsFolder\n"
        "runs = RunsFolder(Path(sys.argv[1])); runs.sweep(''); runs.claim('train-0')\n"
        "with runs.begin('train-0') as folder:\n"
        "    (folder / 'run.db').touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "runs")], env=environment())
    assert killed.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path / "runs") == ["train-0"]
    code = (
        "import sys; from pathlib import Path; from rankwatch_monitor.serve.files.run_folder import RunsFolder\n"
        "runs = RunsFolder(Path(sys.argv[1])); runs.sweep(''); print(runs.claim('train-0'))\n"
    )
    again = subprocess.check_output([sys.executable, "-c", code, str(tmp_path / "runs")], env=environment(), text=True)
    assert again == "True\n"
