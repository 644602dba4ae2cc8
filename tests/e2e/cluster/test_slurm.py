"""The recipes of ``deploy/slurm`` on a real SLURM of two nodes with two ranks each."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from collectors import until
from e2e.cluster.slurm import ENDED, Slurm, skip_without_slurm
from e2e.hosts import Hosts
from jobs import INTERPRETER, ROOT, SCRIPTS, environment

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.slow]

RECIPES = ROOT / "deploy" / "slurm"
NODES = ["node0", "node1"]
SMALL = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=2", "--time=5"]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose ``rankwatch``, ``torchrun`` and ``python`` are this Python's."""
    folder = tmp_path_factory.mktemp("bin")
    for name, words in (("rankwatch", "-m rankwatch_monitor"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {INTERPRETER} {words} "$@"\n')
        (folder / name).chmod(0o755)
    return environment(PATH=f"{folder}:{os.environ['PATH']}:/usr/sbin:/sbin", PYTHONUNBUFFERED="1")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    skip_without_slurm()
    hosts = Hosts(["head", *NODES])
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tools: dict[str, str]) -> Iterator[Slurm]:
    slurm = Slurm(hosts, NODES, tools)
    yield slurm
    slurm.close()


class Submitted:
    """A job that a recipe starts; files control its training (``scripts/told.py``)."""

    def __init__(self, slurm: Slurm, folder: Path, recipe: str, *options: str, **env: str) -> None:
        self.slurm = slurm
        self.folder = folder
        self.words = folder / "words"
        self.words.mkdir()
        command = [*SMALL, *options, str(RECIPES / recipe), str(SCRIPTS / "told.py"), str(self.words)]
        self.id = slurm.submit(folder, *command, TMPDIR=str(folder), **env)
        self.runs = folder / "rankwatch-runs"

    def train(self) -> Submitted:
        """Waits until all ranks have trained some batches."""
        until(lambda: self.has_trained or self.slurm.state(self.id) in ENDED)
        assert self.has_trained, self.output
        return self

    def tell(self, word: str) -> None:
        (self.words / word).touch()

    def wait(self) -> tuple[str, str]:
        return self.slurm.wait(self.id)

    @property
    def has_trained(self) -> bool:
        return len(list(self.words.glob("trained-*"))) == 4

    @property
    def where(self) -> list[str]:
        return [(self.words / f"trained-{rank}").read_text().split()[0] for rank in range(4)]

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.out"))

    def report(self, attempt: int = 0) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads((self.runs / f"train-{self.id}-{attempt}" / "report.json").read_text())
        return parsed


DOCTOR = '\n    "${each[@]}" "${start[@]}" -m rankwatch.doctor\n'


def quick(folder: Path, **settings: str) -> str:
    """The recipe without its doctor, for tests of what follows; ``settings`` replace the recipe's own."""
    return changed(folder, "train.sbatch", {DOCTOR: "\n    true\n"}, **settings)


def changed(folder: Path, recipe: str, changes: dict[str, str] | None = None, **settings: str) -> str:
    text = (RECIPES / recipe).read_text()
    set_here = {f"\n{name}=no ": f"\n{name}={value} " for name, value in settings.items()}
    for ours, here in {**(changes or {}), **set_here}.items():
        assert text.count(ours) == 1
        text = text.replace(ours, here)
    (folder / recipe).write_text(text)
    return str(folder / recipe)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "slurm" in request.fixturenames:
        hosts: Hosts = request.getfixturevalue("hosts")
        until(lambda: not [line for name in NODES for line in hosts.running(name) if "told.py" in line])


def test_the_recipes_are_clean_bash() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not here: apt-get install shellcheck")
    subprocess.run(["shellcheck", *RECIPES.iterdir()], check=True)


def test_a_clean_run_with_five_lines(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, "minimal.sbatch").train()
    assert job.where == ["node0", "node0", "node1", "node1"]
    job.tell("stop")
    assert job.wait() == ("COMPLETED", "0:0")
    assert job.report()["outcome"] == "finished"
    assert f"run train-{job.id}-0 finished: 4 ranks" in job.output
    assert not list(tmp_path.glob("rankwatch-*.json*"))


def test_a_clean_run_with_five_lines_starts_again(slurm: Slurm, tmp_path: Path) -> None:
    again = {"rankwatch run --job": "rankwatch run --max-restarts 1 --job"}
    job = Submitted(slurm, tmp_path, changed(tmp_path, "minimal.sbatch", again)).train()
    job.tell("kill-1")
    until(lambda: (job.runs / f"train-{job.id}-0" / "report.json").exists())
    for path in job.words.iterdir():
        path.unlink()
    job.train().tell("stop")
    assert job.wait() == ("COMPLETED", "0:0")
    assert job.report(attempt=1)["outcome"] == "finished"
    assert "started again (1 of 1), restart: rank 1 was killed by SIGKILL" in job.output


def test_an_overflow_on_the_second_node(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, "train.sbatch").train()
    job.tell("overflow-3")
    assert job.wait() == ("FAILED", "77:0")
    verdict = job.report()["verdict"]
    assert (verdict["rank"], verdict["host"], verdict["module"]) == (3, "node1", "square")
    assert f"first inf in run train-{job.id}-0: rank 3, batch " in job.output
    assert job.report()["acknowledged_in"] is not None


def test_one_task_per_gpu(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, "train.sbatch", "--ntasks-per-node=2", "--gpus-per-task=1").train()
    assert job.where == ["node0", "node0", "node1", "node1"]
    job.tell("overflow-2")
    assert job.wait() == ("FAILED", "77:0")
    verdict = job.report()["verdict"]
    assert (verdict["rank"], verdict["host"], verdict["local_rank"]) == (2, "node1", 0)


def test_scancel(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, quick(tmp_path)).train()
    slurm.run("scancel", job.id)
    assert job.wait()[0] == "CANCELLED"
    until(lambda: f"run train-{job.id}-0 aborted: stopped by SIGTERM" in job.output)


def test_a_job_near_its_time_limit_is_requeued_and_then_finishes(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, quick(tmp_path, requeue="yes")).train()
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)  # SLURM itself does this two minutes before the limit
    until(lambda: slurm.state(job.id) == "PENDING")
    assert job.report()["reason"] == "stopped by SIGINT"
    for path in job.words.iterdir():
        path.unlink()
    # Without this SLURM holds the job for two minutes: in the second of the requeue, the nodes still count it as dead.
    slurm.run("scontrol", "update", f"job={job.id}", "StartTime=now+2seconds")
    job.train().tell("stop")
    assert job.wait() == ("COMPLETED", "0:0")
    assert job.report(attempt=1)["outcome"] == "finished"
    assert not list(job.runs.glob("connection*"))
    assert f"run train-{job.id}-0 aborted" in job.output
    assert f"run train-{job.id}-1 finished: 4 ranks" in job.output


def test_a_job_whose_rank_was_killed_is_requeued_and_then_finishes(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, quick(tmp_path, requeue="yes")).train()
    job.tell("kill-1")  # on the collector's host, which knows how its process ended
    until(lambda: slurm.state(job.id) == "PENDING" or slurm.state(job.id) in ENDED)
    assert job.report()["advice"]["action"] == "restart"
    for path in job.words.iterdir():
        path.unlink()
    slurm.run("scontrol", "update", f"job={job.id}", "StartTime=now+2seconds")
    job.train().tell("stop")
    assert job.wait() == ("COMPLETED", "0:0")
    assert job.report(attempt=1)["outcome"] == "finished"
    assert "requeued: restart\n" in job.output


def test_a_suspected_node_is_left_out_of_the_requeued_job(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, quick(tmp_path, requeue="yes")).train()
    job.tell("kill-3")  # of another host's rank only the silence is known
    until(lambda: "ExcNodeList=node1" in slurm.run("scontrol", "--oneliner", "show", "job", job.id))
    advice = job.report()["advice"]
    assert (advice["action"], advice["hosts"]) == ("restart-elsewhere", ["node1"])
    until(lambda: slurm.state(job.id) != "COMPLETING")
    assert slurm.state(job.id) == "PENDING"  # of two nodes, one is not enough
    slurm.run("scancel", job.id)
    slurm.until_idle()


def test_what_the_code_does_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, quick(tmp_path, requeue="yes")).train()
    job.tell("overflow-3")
    assert job.wait() == ("FAILED", "77:0")
    assert job.report()["advice"]["action"] == "fix-code"
    assert "not requeued, after 0 times: fix-code" in job.output


def test_a_node_that_is_killed(slurm: Slurm, hosts: Hosts, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, quick(tmp_path), "--no-requeue", RANKWATCH_ABORT_GRACE="1").train()
    hosts.crash("node1")
    try:
        state, _ = job.wait()
        assert state in ("FAILED", "NODE_FAIL")
        assert job.report()["outcome"] == "lost"
        # SLURM ends the ranks of the other node, too, sooner than a rank that nobody saw die is lost.
        assert [row["state"] for row in job.report()["ranks"]][2:] == ["lost"] * 2
        assert re.match(r"ranks? [23]\b.* lost", job.report()["reason"]), job.report()["reason"]
        assert f"run train-{job.id}-0 lost: rank" in job.output
    finally:
        slurm.boot("node1")
        slurm.until_idle()


def test_a_collector_on_the_head_node(slurm: Slurm, hosts: Hosts, tools: dict[str, str], tmp_path: Path) -> None:
    env = {"RANKWATCH_CONNECTION": str(tmp_path / "rankwatch.json"), "RANKWATCH_RUNS_DIR": str(tmp_path / "rankwatch-runs")}
    options = ["--keep-keys", "--listen", "tcp://*:27077", "--connection-file", env["RANKWATCH_CONNECTION"]]
    command = [*hosts.command("head"), "rankwatch", "collector", *options, "--runs-dir", env["RANKWATCH_RUNS_DIR"]]
    with subprocess.Popen(command, env=tools, stderr=subprocess.PIPE, text=True) as collector:
        assert collector.stderr is not None
        try:
            assert "collecting on tcp://head:27077" in collector.stderr.readline()
            killed, recipe = tmp_path / "killed", changed(tmp_path, "shared-collector.sbatch", requeue="yes")
            killed.mkdir()
            lost = Submitted(slurm, killed, recipe, **env).train()
            lost.tell("kill-3")
            until(lambda: "ExcNodeList=node1" in slurm.run("scontrol", "--oneliner", "show", "job", lost.id))
            slurm.run("scancel", lost.id)
            slurm.until_idle()
            job = Submitted(slurm, tmp_path, recipe, **env).train()
            job.tell("overflow-3")
            # The code of torchrun, or of a torchrun that srun terminated because the other node's had ended.
            assert job.wait() in (("FAILED", "1:0"), ("FAILED", "143:0"))
        finally:
            collector.terminate()
    assert job.report()["verdict"]["host"] == "node1"
    assert f"first inf in run train-{job.id}-0: rank 3, batch " in job.output
    assert "not requeued, after 0 times: fix-code" in job.output


SIGNALLED = """#!/bin/bash
{prefix} rankwatch run --runs-dir runs -- python {script} {folder}
"""


@pytest.mark.parametrize(("to_whom", "prefix"), [("B:USR1", "exec"), ("USR1", "srun --ntasks=1")], ids=["batch", "step"])
def test_the_signal_before_the_limit_reaches_the_training_once(
    tmp_path: Path, slurm: Slurm, to_whom: str, prefix: str
) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(SIGNALLED.format(prefix=prefix, script=SCRIPTS / "signalled.py", folder=tmp_path))
    job = slurm.submit(tmp_path, "--nodes=1", "--time=1", f"--signal={to_whom}@30", str(script))
    ended = slurm.wait(job)
    said = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert ended == ("COMPLETED", "0:0"), said
    got = [signal.Signals(int(word)) for word in (tmp_path / "signals-0").read_text().split()]
    assert sorted(got) == [signal.SIGUSR1, signal.SIGCONT]  # SLURM sends the second one as well
    assert (tmp_path / "saved.pt").stat().st_size
    assert json.loads((tmp_path / "runs" / "latest" / "report.json").read_text())["outcome"] == "finished", said
