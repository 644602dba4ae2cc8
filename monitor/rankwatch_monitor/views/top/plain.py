"""A run as lines, for a file or a log: its state when it has changed, what is desynced, each notice and the end."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rankwatch.shared.printable import one_line

from ...decide.core.gaps import Gap, describe_gap
from ...decide.core.report import Report
from ...decide.replicas.desync_text import desync_lines
from ...record.follow import Newest, View
from ...record.schema import StoreError
from .. import stalls
from ..text import NoticeKey, noticed, render
from .layout import Scene, describe_run, describe_silence
from .ranks import describe_states
from .sparks import losses_of
from .tables import describe_most_urgent, is_urgent

LOOK = 1.0
"""Seconds between reads of the record. Lines with the state come less often."""


class Changes:
    """Views of one run -> lines with what is new in them. Pure."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._due = float("-inf")
        self._printed: tuple[object, ...] = ()
        self._noticed: set[NoticeKey] = set()
        self._desynced: set[object] = set()
        self._reason = self._stalled = ""
        self._stacks: set[str] = set()
        self._gaps: set[Gap] = set()
        self._skipped: set[str] = set()
        self._collectives: set[str] = set()

    def lines(self, view: View, now: float) -> Iterator[str]:
        """The lines of what is new, without newlines. ``now``: Unix seconds."""
        scene = Scene.of(view, now)
        report = view.report
        for origin, text in desync_lines(report.desync, report.world_size).items():
            if origin not in self._desynced:
                self._desynced.add(origin)
                yield f"{report.run}: desync: {text}"
        yield from self._stall(report)
        for key, text in noticed(report).items():
            if key not in self._noticed:
                self._noticed.add(key)
                yield f"{report.run}: noticed: {text}"
        for one in report.skipped:
            if one.brief not in self._skipped:
                self._skipped.add(one.brief)
                yield f"{report.run}: left out: {one.brief}: {one.verdict.evidence}"
        for differ in report.collectives:
            if differ.text not in self._collectives:
                self._collectives.add(differ.text)
                yield f"{report.run}: collectives: {differ.text}"
        for gap in report.gaps:
            if gap not in self._gaps:
                self._gaps.add(gap)
                yield f"{report.run}: {describe_gap(gap, report.world_size)}"
        if report.reason and report.reason != self._reason:
            self._reason = report.reason
            yield one_line(f"{report.run}: {report.outcome.value}: {report.reason}")
        if view.is_over:
            yield from render(report).split("\n")[:-1]
        elif now >= self._due:
            self._due = now + self._interval
            news = [rank.batch for rank in scene.ranks], [rank.state for rank in scene.ranks], bool(describe_silence(scene))
            if news != self._printed:
                self._printed = news
                yield describe(scene)

    def _stall(self, report: Report) -> Iterator[str]:
        """A stall that is new, its stacks as they come, and its end."""
        if report.stalled != self._stalled:
            self._stalled, self._stacks = report.stalled, set()
            yield f"{report.run}: {report.stalled or 'no rank is stalled any more'}"
        for stack in stalls.stacks(report).values():
            if stack[0] not in self._stacks:
                self._stacks.add(stack[0])
                yield f"{report.run}: {stack[0]}"
                yield from stack[1:]


def describe(scene: Scene) -> str:
    """The state of a run, in one line."""
    parts = [f"{scene.view.report.run}: {describe_run(scene)}", describe_states(rank.state for rank in scene.ranks)]
    losses = [f"{name} {means[-1][1]:.3g}" for name, means in losses_of(scene.view.recent) if means]
    nearest = scene.view.headroom[0] if scene.view.headroom else None
    parts += [", ".join(losses)] if losses else []
    if nearest is not None and (nearest.is_narrow or is_urgent(nearest) or not losses):
        growth = f", x{nearest.growth:.3f} a batch" if nearest.growth is not None and nearest.growth > 1.0005 else ""
        parts.append(f"{describe_most_urgent(nearest)}{growth}")
    return "; ".join([*parts, describe_silence(scene)]).removesuffix("; ")


def follow(newest: Newest, interval: float) -> None:
    """Prints what is new until the run is over."""
    changes, run, waiting = Changes(interval), "", ""
    while True:
        try:
            view = newest.look()
        except StoreError as error:
            if str(error) != waiting:
                waiting = str(error)
                print(f"{waiting}: waiting for it", flush=True)
        else:
            if view.report.run != run:
                changes, run = Changes(interval), view.report.run
            for line in changes.lines(view, time.time()):
                print(line, flush=True)
            if view.is_over:
                return
        time.sleep(min(LOOK, interval))
