"""A job that is launched again while a node of its last start is cut off, or its ranks hang: both starts are half alive."""

from __future__ import annotations

import signal
from collections.abc import Callable

from e2e.site import ABORTED, Rank, Site
from e2e.soaking.crew import Crew, Runs
from e2e.soaking.part import Part
from e2e.soaking.proxy import Proxy

HEARTBEAT = 0.4
FAR = (1, 2)
"""Ranks on the node that is cut off: at least and at most."""

OUTAGE = (0.0, 4 * HEARTBEAT)
"""Seconds before and after the relaunch: some outages end before a rank counts as lost."""


class Relaunches(Part):
    def begin(self) -> None:
        self.site = Site([self.forge], self.folder)
        self.site.collect(heartbeat=HEARTBEAT)
        self.proxy = Proxy(self.site.connection, self.folder / "proxied.json")
        self.runs = Runs(self.site.runs)
        self.crews: list[Crew] = []

    def round(self) -> None:
        near, far = [self.site.connection], [self.proxy.connection] * self.random.randint(*FAR)
        starts = [f"start-{self.rounds}-{number}" for number in range(2)]
        old, new = self.crews = [Crew(self.forge, self.folder / start, start, [*near, *far]) for start in starts[:1]] + [
            Crew(self.forge, self.folder / starts[1], starts[1], near * (1 + len(far)))
        ]
        self._begin(old)
        self.pause(0, 1)
        mend = self._cut_off(old.ranks[1:])
        self.pause(*OUTAGE)
        self._begin(new)
        self.pause(*OUTAGE)
        mend()
        self.pause(*OUTAGE)
        if self.random.random() < 0.5:
            new.finish()
            self.runs.check_finished(new)
        else:
            culprit = self.random.randrange(len(new.ranks))
            self.runs.check_overflow(new, culprit, new.overflow(culprit))
        self._check_old(old)
        assert "Traceback" not in self.site.log
        assert "an error of ours" not in self.site.log

    def end(self) -> None:
        for crew in self.crews:
            crew.clear()
        self.proxy.close()
        self.site.clear()

    def _begin(self, crew: Crew) -> None:
        """A start is watched at once, whatever has become of the one before."""
        crew.go()
        crew.is_ready()
        assert all(rank.ask("is_connected") for rank in crew.ranks), [rank.errors for rank in crew.ranks]
        crew.train()

    def _cut_off(self, ranks: list[Rank]) -> Callable[[], None]:
        """Cuts these ranks off; returns what brings them back."""
        how = self.random.choice(["network cut", "ranks stopped", "ranks killed"])
        self.counts[how] += 1
        if how == "network cut":
            self.proxy.cut()
            return self.proxy.mend
        for rank in ranks:
            rank.kill(signal.SIGKILL if how == "ranks killed" else signal.SIGSTOP)

        def wake() -> None:
            for rank in ranks if how == "ranks stopped" else []:
                rank.kill(signal.SIGCONT)

        return wake

    def _check_old(self, old: Crew) -> None:
        """It came back unharmed, or ended as lost; nobody else's overflow has stopped it."""
        codes = old.let_go()
        report = self.runs.report(old)
        self.counts[f"old start {report['outcome']}"] += 1
        assert report["verdict"] is None, report
        assert set(codes) <= {0, ABORTED, -signal.SIGKILL}
        if report["outcome"] == "finished":
            assert codes == [0] * len(codes), (codes, report)
        else:
            assert report["outcome"] == "lost", report
        self.runs.check_no_holes(old)
