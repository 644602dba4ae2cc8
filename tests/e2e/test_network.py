"""Faults of the network between hosts: the collector on one, ranks on two others, and a switch with bad cables between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from collectors import until
from e2e.hosts import NODES, Hosts
from e2e.site import ABORTED, Forge, Site, trained, trip_stops_all

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def forges(hosts: Hosts) -> Iterator[list[Forge]]:
    forges = [Forge(hosts.command(name)) for name in NODES]
    yield forges
    for forge in forges:
        forge.close()


@pytest.fixture
def site(hosts: Hosts, forges: list[Forge], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Rank 0 is on node0, rank 1 on node1."""
    hosts.chance.seed(request.node.name)
    site = Site(forges, tmp_path, listen=f"tcp://{hosts.address['head']}:0", host=hosts.command("head"))
    yield site
    for cable in hosts.cables.values():
        cable.is_cut, cable.delay, cable.loss = False, 0.0, 0.0
    site.clear()


def test_ranks_on_other_hosts_are_stopped_by_a_trip(site: Site) -> None:
    site.collect()
    for rank in site.start(2):
        assert rank.ask("batches", 3) == 3
    trip_stops_all(site, culprit=1)


def test_a_network_that_is_cut_and_repaired_loses_no_batch_and_no_rank(site: Site, hosts: Hosts) -> None:
    site.collect()
    ranks = site.start(2)
    site.train(3, settles=True)
    hosts.cables["head"].is_cut = True
    site.train(3, to=6)
    until(lambda: "silent and cut off, as are all others" in site.log)  # the kernel has closed the connections
    site.train(3, to=9)
    hosts.cables["head"].is_cut = False
    until(lambda: len(site.greeted()) >= 4)
    for rank in ranks:
        assert rank.ask("settle")
        assert rank.ask("batches", 3) == 12
        assert rank.close() == 0
    until(lambda: "run train-0 finished: 2 ranks, 12 batches, no inf or nan" in site.out)
    assert site.recorded() == trained(12, 12)


def test_a_node_that_is_cut_off_alone_is_lost_and_the_others_are_stopped(site: Site, hosts: Hosts) -> None:
    site.collect()
    left, cut = site.start(2)
    site.train(3, settles=True)
    hosts.cables["node1"].is_cut = True
    until(lambda: "rank 1 of 2" in site.log and "was lost: nothing heard for 30 s" in site.log)  # the other one stands still
    left.tell("train")
    assert left.wait() == ABORTED
    assert "rank 1 of 2" in left.errors
    until(lambda: "run train-0 lost" in site.out)
    assert [row["state"] for row in site.report()["ranks"]] == ["aborted", "lost"]
    hosts.cables["node1"].is_cut = False
    cut.tell("train")
    assert cut.wait() == ABORTED  # it receives the abort as soon as it is connected again


def test_with_on_lost_wait_a_node_that_is_cut_off_may_return(site: Site, hosts: Hosts) -> None:
    site.collect("--on-lost", "wait")
    left, cut = site.start(2)
    site.train(3, settles=True)
    hosts.cables["node1"].is_cut = True
    assert cut.ask("batches", 3) == 6
    until(lambda: "rank 1 of 2" in site.log and "was lost" in site.log)
    assert left.ask("batches", 3) == 6
    hosts.cables["node1"].is_cut = False
    until(lambda: "is back" in site.log)
    for rank in (left, cut):
        assert rank.ask("settle")
        assert rank.close() == 0
    until(lambda: "run train-0 finished: 2 ranks, 6 batches, no inf or nan" in site.out)
    assert site.recorded() == trained(6, 6)


def test_slow_and_lossy_cables_only_cost_time(site: Site, hosts: Hosts) -> None:
    site.collect(heartbeat=1.0)
    for name in NODES:
        hosts.cables[name].delay, hosts.cables[name].loss = 0.05, 0.05
    ranks = site.start(2)
    site.train(20)
    for rank in ranks:
        assert rank.ask("settle")
    assert site.recorded() == trained(20, 20)
    trip_stops_all(site, culprit=0)


def test_a_rank_behind_a_bad_network_is_not_lost_while_all_stand_still(site: Site, hosts: Hosts) -> None:
    """As in a collective that the same packets hold up: an answer takes 0.6 s, and a third of all answers is lost."""
    site.collect(heartbeat=1.0)
    ranks = site.start(2)
    site.train(3, settles=True)
    hosts.cables["node1"].delay, hosts.cables["node1"].loss = 0.3, 0.2
    until(lambda: ranks[1].errors.count("the collector is back") == 2 or "was lost" in site.log)
    hosts.cables["node1"].delay = hosts.cables["node1"].loss = 0.0
    site.train(3, to=6, settles=True)
    for rank in ranks:
        assert rank.close() == 0
    until(lambda: "run train-0 finished: 2 ranks, 6 batches, no inf or nan" in site.out)
