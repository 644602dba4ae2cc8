"""A readout of the collector's meters -> Prometheus metric families. Pure; each metric's name and help is here.

The label ``run`` has few values (see meters.MAX_OVER). The label ``rank`` exists under --metrics-per-rank alone. When a run is
over, its live metrics have no more samples, so that no alert stays on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from rankwatch import __version__
from rankwatch.shared.types.frame import NO_LOSS

from ...decide.core.effects import Show
from ...decide.core.report import Outcome, RankState
from ...decide.core.standing import RankStanding
from .meters import Gauged, Readout

Samples: TypeAlias = Iterable[tuple[Sequence[str], float]]
"""For each sample the values of the labels after ``run``, and its own value."""


class RunTotals(NamedTuple):
    """A run, with its ranks added up. ``front``: the batch of the furthest rank; ``skew``: batches between the first and the last
    running rank; ``still``: seconds that the running rank without progress for longest has made none."""

    gauged: Gauged
    states: Counter[RankState]
    front: int
    skew: int
    still: float
    silent: int
    queued: int
    dropped: int

    @property
    def shown(self) -> Show:
        return self.gauged.shown

    @property
    def state(self) -> str:
        standing = self.shown.standing
        return (standing.outcome or Outcome.FINISHED).value if standing.over else "running"


class Family(NamedTuple):
    """A metric of every run, or of every rank, and the function that reads it. A counter's name ends in ``_total``."""

    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[RunTotals], Samples]


def add_up(gauged: Gauged) -> RunTotals:
    standings = gauged.shown.standings
    states = Counter(standing.state for standing in standings)
    states[RankState.MISSING] += gauged.shown.standing.world_size - len(standings)
    running = [standing for standing in standings if standing.state is RankState.RUNNING]
    batches = [standing.batch for standing in running]
    return RunTotals(
        gauged,
        states,
        front=max((standing.batch for standing in standings), default=-1),
        skew=max(batches) - min(batches) if batches else 0,
        still=max((standing.still for standing in running), default=0.0) + gauged.age if running else 0.0,
        silent=sum(bool(standing.quiet) for standing in running),
        queued=sum(standing.queued for standing in running),
        dropped=sum(standing.dropped for standing in standings),
    )


def _one(value: float) -> Samples:
    return [((), value)]


def _while_under_way(value: Callable[[RunTotals], float | None]) -> Callable[[RunTotals], Samples]:
    def samples(run: RunTotals) -> Samples:
        one = None if run.shown.standing.over else value(run)
        return () if one is None else _one(one)

    return samples


def _headroom(run: RunTotals) -> float | None:
    doublings = run.gauged.headroom
    return None if doublings is None else 2.0**doublings if doublings < 1024 else float("inf")


def _of_ranks(value: Callable[[RankStanding], float]) -> Callable[[RunTotals], Samples]:
    return lambda run: [((str(standing.rank),), value(standing)) for standing in run.shown.standings]


RUN_STATES = ("running", *(outcome.value for outcome in Outcome))

FAMILIES = (
    Family(
        "rankwatch_run_state", "1 for the run's state, 0 for the others.", ("state",),
        lambda run: [((state,), state == run.state) for state in RUN_STATES],
    ),
    Family(
        "rankwatch_ranks", "Ranks of the run by state; missing ones have never connected.", ("state",),
        lambda run: [((state.value,), run.states[state]) for state in RankState],
    ),
    Family(
        "rankwatch_stalled_ranks", "Running ranks that made no progress for --stall-after, so that the others wait.", (),
        _while_under_way(lambda run: run.shown.standing.stalled),
    ),
    Family(
        "rankwatch_silent_ranks", "Running ranks that sent nothing for three heartbeats.", (),
        _while_under_way(lambda run: run.silent),
    ),
    Family(
        "rankwatch_standstill_seconds", "Longest time since a running rank made progress.", (),
        _while_under_way(lambda run: run.still),
    ),
    Family(
        "rankwatch_batches_total", "Batches that the furthest rank has begun; its rate is the batch rate.", (),
        lambda run: _one(run.front + 1),
    ),
    Family(
        "rankwatch_batch", "The batch that the furthest rank is in, counted from 0 as in reports; -1 before the first.", (),
        lambda run: _one(run.front),
    ),
    Family(
        "rankwatch_batch_skew", "Batches between the first and the last running rank.", (),
        _while_under_way(lambda run: run.skew),
    ),
    Family(
        "rankwatch_headroom_ratio",
        "Smallest factor in the last minute between a reading and the largest number of its dtype, over all ranks.", (),
        _while_under_way(_headroom),
    ),
    Family(
        "rankwatch_loss", "Mean of the ranks' last losses, as given to backward().", (),
        _while_under_way(lambda run: None if (loss := run.shown.standing.loss) == NO_LOSS else loss),
    ),
    Family(
        "rankwatch_trips_total", "Ranks that tripped.", (),
        lambda run: _one(run.shown.standing.tripped),
    ),
    Family(
        "rankwatch_skipped_steps_total", "Optimizer steps that were left out, on all ranks alike.", (),
        lambda run: _one(run.shown.standing.skipped),
    ),
    Family(
        "rankwatch_desynced_parameters_total",
        "Parameters that replicas disagree on, that never changed or came untied, and inputs that ranks share.", (),
        lambda run: _one(run.shown.standing.desynced),
    ),
    Family(
        "rankwatch_differing_groups_total", "Process groups whose members do not call the same collectives.", (),
        lambda run: _one(run.shown.standing.collectives),
    ),
    Family(
        "rankwatch_dropped_batches_total", "Batches that ranks dropped: the collector was out of reach, or too slow.", (),
        lambda run: _one(run.dropped),
    ),
    Family(
        "rankwatch_queued_messages", "Messages in the ranks that the collector has not acknowledged.", (),
        _while_under_way(lambda run: run.queued),
    ),
)  # fmt: skip

RANK_FAMILIES = (
    Family(
        "rankwatch_rank_state", "1 for the rank's state.", ("rank", "state"),
        lambda run: [((str(rank.rank), rank.state.value), 1) for rank in run.shown.standings],
    ),
    Family(
        "rankwatch_rank_batch", "The batch that the rank is in, counted from 0; -1 before the first.", ("rank",),
        _of_ranks(lambda rank: rank.batch),
    ),
    Family(
        "rankwatch_rank_silence_seconds", "Time since the rank sent anything.", ("rank",),
        _of_ranks(lambda rank: rank.silent),
    ),
    Family(
        "rankwatch_rank_standstill_seconds", "Time since the rank made progress.", ("rank",),
        _of_ranks(lambda rank: rank.still),
    ),
    Family(
        "rankwatch_rank_dropped_batches_total", "Batches that the rank dropped.", ("rank",),
        _of_ranks(lambda rank: rank.dropped),
    ),
    Family(
        "rankwatch_rank_queued_messages", "Messages in the rank that the collector has not acknowledged.", ("rank",),
        _of_ranks(lambda rank: rank.queued),
    ),
)  # fmt: skip


def families(readout: Readout, *, per_rank: bool = False) -> Iterator[Metric]:
    """All families, including those without a sample."""
    runs = [add_up(gauged) for gauged in readout.runs]
    yield from _of_collector(readout)
    info = InfoMetricFamily("rankwatch_run", "Job and restart count of each run.", labels=["run"])
    for run in runs:
        standing = run.shown.standing
        info.add_metric([run.shown.run], {"job": standing.job, "restart": str(standing.restart)})
    yield info
    for family in (*FAMILIES, *(RANK_FAMILIES if per_rank else ())):
        metric = _metric(family.name, family.help, ("run", *family.labels))
        for run in runs:
            for labels, value in family.samples(run):
                metric.add_metric([run.shown.run, *labels], value)
        yield metric


def _of_collector(readout: Readout) -> Iterator[Metric]:
    yield InfoMetricFamily("rankwatch_build", "The collector's version.", {"version": __version__})
    counts = readout.counts
    for name, text, value in (
        ("rankwatch_runs", "Runs under way.", sum(not gauged.shown.standing.over for gauged in readout.runs)),
        ("rankwatch_received_messages_total", "Messages received from ranks.", counts.messages),
        ("rankwatch_received_bytes_total", "Bytes of the messages received from ranks.", counts.bytes),
        ("rankwatch_refused_messages_total", "Messages that were malformed.", counts.refused),
        ("rankwatch_put_off_bytes", "Bytes of batches that wait for the collector's loop.", counts.put_off),
        ("rankwatch_unwritten_bytes", "Bytes of batches that wait for the disk.", counts.unwritten),
        ("rankwatch_loop_age_seconds", "Seconds since the collector's loop last turned.", readout.age),
    ):
        metric = _metric(name, text, ())
        metric.add_metric([], value)
        yield metric
    ended = _metric("rankwatch_ended_runs_total", "Runs that have ended under this collector, by outcome.", ("outcome",))
    for outcome in Outcome:
        ended.add_metric([outcome.value], readout.ended.get(outcome, 0))
    yield ended


def _metric(name: str, text: str, labels: Sequence[str]) -> CounterMetricFamily | GaugeMetricFamily:
    family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return family(name, text, labels=labels)
