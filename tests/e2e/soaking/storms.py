"""Dozens of runs of one job name that start in one folder at one moment, at one collector and at several."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from collectors import until
from e2e.site import ABORTED, Site
from e2e.soaking.crew import Crew, Runs
from e2e.soaking.part import Part
from rankwatch_monitor.record.runs import folders, read_row
from rankwatch_monitor.record.schema import FILE

COLLECTORS = 3
HEARTBEAT = 2.0
"""Of 48 ranks that start at once on two cores, each comes to its turn within the three beats after which it would be lost."""
RUNS = (6, 24)
RANKS = (1, 2)
"""At least and at most: of a storm, and of a run."""


class Latest(threading.Thread):
    """Reads ``latest`` all the time: once it is there, it always names a run that can be read."""

    def __init__(self, runs: Path) -> None:
        super().__init__()
        self._path = runs / "latest"
        self._over = threading.Event()
        self.reads = 0
        self.failure = ""
        self.start()

    def run(self) -> None:
        until(lambda: self._path.is_symlink() or self._over.is_set())
        while not self._over.wait(0.002) and not self.failure:
            try:
                read_row(self._path)
                self.reads += 1
            except Exception as error:  # noqa: BLE001 (whatever it is, the reader has failed)
                self.failure = repr(error)

    def end(self) -> None:
        self._over.set()
        self.join()
        assert not self.failure, self.failure


class Storms(Part):
    def begin(self) -> None:
        self.runs = Runs(self.folder / "runs")
        self.sites = []
        for number in range(COLLECTORS):
            (own := self.folder / f"collector-{number}").mkdir()
            site = Site([self.forge], own)
            site.runs = self.runs.path
            site.collect(heartbeat=HEARTBEAT)
            self.sites.append(site)
        self.crews: list[Crew] = []
        self.latest = Latest(self.runs.path)

    def round(self) -> None:
        used = self.sites if self.random.random() < 0.7 else [self.random.choice(self.sites)]
        self.crews = self._muster(used)
        for crew in self.crews:
            crew.go()
        if self.random.random() < 0.3:
            self.pause(0, 1)
            self._restart(self.random.choice(used))
        for crew in self.crews:
            crew.is_ready()
            crew.connect()
            crew.train()
        self.pause(0, 1)
        self._end_all()
        assert len({self.runs.of(crew) for crew in self.crews}) == len(self.crews)
        assert all((folder / FILE).exists() for folder in folders(self.runs.path))
        for site in self.sites:
            assert "Traceback" not in site.log
            assert "an error of ours" not in site.log

    def end(self) -> None:
        for crew in self.crews:
            crew.clear()
        for site in self.sites:
            site.clear()
        self.latest.end()
        self.counts["reads of latest"] = self.latest.reads

    def _muster(self, sites: list[Site]) -> list[Crew]:
        crews = []
        for number in range(self.random.randint(*RUNS)):
            name = f"storm-{self.rounds}-{number}"
            connection = self.random.choice(sites).connection
            crews.append(Crew(self.forge, self.folder / name, name, [connection] * self.random.randint(*RANKS)))
        self.counts["storms"] += 1
        self.counts["runs"] += len(crews)
        return crews

    def _restart(self, site: Site) -> None:
        """Kills a collector while runs begin, and starts it again."""
        self.counts["collectors killed"] += 1
        site.collectors[-1].kill()
        site.collectors[-1].wait()
        self.pause(0, 0.5)
        site.collect(heartbeat=HEARTBEAT)

    def _end_all(self) -> None:
        """Some runs overflow, some lose a rank to a signal; the others go on, and finish."""
        crews = self.random.sample(self.crews, len(self.crews))
        overflowed, killed, healthy = crews[:2], crews[2:3], crews[3:]
        self.counts.update({"overflows": len(overflowed), "ranks killed": len(killed)})
        for crew in overflowed:
            culprit = self.random.randrange(len(crew.ranks))
            batch = crew.overflow(culprit)
            self.runs.check_overflow(crew, culprit, batch)
        for crew in killed:
            victim, *others = self.random.sample(crew.ranks, len(crew.ranks))
            victim.kill()
            assert [rank.wait() for rank in others] == [ABORTED] * len(others)
            report = self.runs.report(crew)
            assert (report["outcome"], report["ranks"][crew.ranks.index(victim)]["state"]) == ("lost", "lost"), json.dumps(
                report
            )
            self.runs.check_no_holes(crew)
        for crew in healthy:
            crew.finish()
        for crew in healthy:
            self.runs.check_finished(crew)
