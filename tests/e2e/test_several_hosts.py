"""Real torchrun jobs over two hosts, and the collector on a third: a routable address, encrypted links, host names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectors import PATIENCE, until
from e2e.hosts import NODES, Hosts
from e2e.site import Site, trained
from jobs import SCRIPTS, environment
from rankwatch.shared.link.connection import read

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.cluster, pytest.mark.slow]


class Job:
    """One torchrun on each node, with two ranks each; files control them, see ``scripts/told.py``."""

    def __init__(self, hosts: Hosts, site: Site) -> None:
        self.folder = site.folder / "words"
        self.folder.mkdir()
        env = environment(RANKWATCH_CONNECTION=str(site.connection), RANKWATCH_JOB="train", TMPDIR=str(site.folder))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500", "--rdzv-id", site.folder.name]
        command = [*torchrun, *rendezvous, str(SCRIPTS / "told.py"), str(self.folder)]
        self.log = site.folder / "job"
        with open(self.log, "w") as log:
            self.nodes = [subprocess.Popen([*hosts.command(n), *command], env=env, stdout=log, stderr=log) for n in NODES]
        until(lambda: self.has_ended or len(list(self.folder.glob("trained-*"))) == 4)
        assert not self.has_ended, self.log.read_text()

    @property
    def has_ended(self) -> bool:
        return any(node.poll() is not None for node in self.nodes)

    def tell(self, word: str) -> None:
        (self.folder / word).touch()

    def wait(self) -> list[int]:
        return [node.wait(PATIENCE) for node in self.nodes]

    def where(self, rank: int) -> str:
        return (self.folder / f"trained-{rank}").read_text().split()[0]


@pytest.fixture
def site(hosts: Hosts, tmp_path: Path) -> Iterator[Site]:
    site = Site([], tmp_path, listen="tcp://*:0", host=hosts.command("head"))
    yield site
    for node in NODES:
        hosts.cables[node].is_cut, hosts.cables[node].delay, hosts.cables[node].loss = False, 0.0, 0.0
        hosts.kill_all(node)
    site.clear()


def test_the_verdict_names_the_host(hosts: Hosts, site: Site) -> None:
    site.collect()
    assert read(site.connection).address.startswith("tcp://head:")
    job = Job(hosts, site)
    assert [job.where(rank) for rank in range(4)] == ["node0", "node0", "node1", "node1"]
    job.tell("overflow-3")
    assert job.wait() == [1, 1]
    verdict = site.report()["verdict"]
    assert (verdict["rank"], verdict["host"], verdict["module"]) == (3, "node1", "square")
    assert (verdict["certainty"], verdict["missing_ranks"]) == ("complete", [])
    assert "culprit    rank 3 of 4 (node1, local rank 1)" in site.out
    assert [row["state"] for row in site.report()["ranks"]] == ["aborted"] * 4
    assert job.log.read_text().count("rank 3 of 4 (node1, local rank 1)") >= 2  # the root cause, on each node


def test_a_node_that_is_cut_off_is_named_as_lost(hosts: Hosts, site: Site) -> None:
    site.collect("--abort-grace", "1")
    job = Job(hosts, site)
    hosts.cables["node1"].is_cut = True
    assert job.nodes[0].wait(PATIENCE) == 1
    states = [("node0", "aborted")] * 2 + [("node1", "lost")] * 2
    report = site.runs / "latest" / "report.json"
    # The ranks may send BYE after torchrun has ended.
    until(lambda: report.exists() and [(row["host"], row["state"]) for row in site.report()["ranks"]] == states)
    assert site.report()["outcome"] == "lost"
    hosts.cables["node1"].is_cut = False
    assert job.nodes[1].wait(PATIENCE) == 1  # it receives the abort as soon as it is connected again


def test_a_node_that_is_cut_off_and_comes_back_leaves_no_gap(hosts: Hosts, site: Site) -> None:
    site.collect("--on-lost", "wait")
    job = Job(hosts, site)
    hosts.cables["node1"].is_cut = True
    # In one line or in two: the ranks were last heard a fraction of a heartbeat apart.
    lost = re.compile(r"(?:rank (?=\d of 4 \(node1, .* was lost)|after it rank )(\d)")
    until(lambda: set(lost.findall(site.log)) == {"2", "3"})
    hosts.cables["node1"].is_cut = False
    job.tell("stop")
    assert job.wait() == [0, 0]
    batches = int((job.folder / "ended").read_text())
    until(lambda: f"run train-0 finished: 4 ranks, {batches} batches, no inf or nan" in site.out)
    assert site.recorded() == trained(*[batches] * 4)


def test_a_job_whose_collectives_cross_a_bad_network_only_takes_longer(hosts: Hosts, site: Site) -> None:
    """An answer of one node takes 0.6 s, and a third of all answers is lost, so that the collectives stand still for seconds."""
    site.collect(heartbeat=1.0)
    job = Job(hosts, site)
    hosts.chance.seed("bad network")
    hosts.cables["node1"].delay, hosts.cables["node1"].loss = 0.3, 0.2
    before = len(site.recorded())
    until(lambda: job.has_ended or len(site.recorded()) >= before + 4 * 4)
    job.tell("stop")
    assert job.wait() == [0, 0], job.log.read_text()
    until(lambda: "rankwatch: run train-0 " in site.out)
    assert f"run train-0 finished: 4 ranks, {(job.folder / 'ended').read_text()} batches, no inf or nan" in site.out
    assert "was lost" not in site.log
