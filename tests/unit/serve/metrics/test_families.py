"""A readout of the meters -> the samples that Prometheus reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from rankwatch_monitor.decide.core.effects import Show
from rankwatch_monitor.decide.core.report import Outcome, RankState
from rankwatch_monitor.serve.metrics.families import RUN_STATES, families
from rankwatch_monitor.serve.metrics.meters import Gauged, LoopCounts, Readout
from standings import shown, standing


def values(*runs: Show, headroom: float | None = None, age: float = 0.0, per_rank: bool = False) -> dict[str, float]:
    """Each sample's value as Prometheus reads it, by its name and labels."""
    return parsed(Readout([Gauged(run, age, headroom) for run in runs]), per_rank=per_rank)


def parsed(readout: Readout, *, per_rank: bool = False) -> dict[str, float]:
    class Source:
        def collect(self) -> Sequence[Metric]:
            return list(families(readout, per_rank=per_rank))

    registry = CollectorRegistry()
    registry.register(Source())
    return {
        f"{sample.name}{_labels(sample.labels)}": sample.value
        for metric in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in metric.samples
    }


def _labels(labels: dict[str, str]) -> str:
    return f"{{{','.join(f'{name}={value}' for name, value in sorted(labels.items()))}}}" if labels else ""


def test_ranks_by_state() -> None:
    found = values(shown(standing(0), standing(1), standing(2, state=RankState.LOST), world_size=8))
    ranks = {state: found[f"rankwatch_ranks{{run=train-0,state={state.value}}}"] for state in RankState}
    some = {RankState.RUNNING: 2, RankState.LOST: 1, RankState.MISSING: 5}
    assert ranks == {**dict.fromkeys(RankState, 0), **some}


def test_the_metrics_of_a_run() -> None:
    ranks = (
        standing(0, batch=12, still=3.0, queued=2, dropped=1),
        standing(1, batch=9, still=40.0, quiet="silent, but still connected", queued=5),
        standing(2, batch=2, state=RankState.FAILED, still=100.0, dropped=4),
    )
    found = values(
        shown(*ranks, tripped=1, stalled=1, desynced=6, skipped=2, collectives=3, loss=0.75), headroom=2.0, age=0.5
    )
    of_run = {name.removesuffix("{run=train-0}"): value for name, value in found.items() if name.endswith("{run=train-0}")}
    assert of_run == {
        "rankwatch_batches_total": 13,
        "rankwatch_batch": 12,
        "rankwatch_batch_skew": 3,
        "rankwatch_standstill_seconds": 40.5,
        "rankwatch_silent_ranks": 1,
        "rankwatch_stalled_ranks": 1,
        "rankwatch_trips_total": 1,
        "rankwatch_desynced_parameters_total": 6,
        "rankwatch_skipped_steps_total": 2,
        "rankwatch_differing_groups_total": 3,
        "rankwatch_headroom_ratio": 4.0,
        "rankwatch_loss": 0.75,
        "rankwatch_queued_messages": 7,
        "rankwatch_dropped_batches_total": 5,
    }
    assert found["rankwatch_run_info{job=train,restart=0,run=train-0}"] == 1


@pytest.mark.parametrize(("doublings", "ratio"), [(0.0, 1.0), (0.5, 2**0.5), (2000.0, math.inf), (math.inf, math.inf)])
def test_headroom_is_a_ratio(doublings: float, ratio: float) -> None:
    assert values(shown(standing()), headroom=doublings)["rankwatch_headroom_ratio{run=train-0}"] == pytest.approx(ratio)


def test_an_unknown_headroom_has_no_sample() -> None:
    assert "rankwatch_headroom_ratio{run=train-0}" not in values(shown(standing()))


def test_a_run_that_is_over_has_no_samples_of_live_metrics() -> None:
    last = standing(0, batch=4, state=RankState.ABORTED)
    found = values(shown(last, over=True, outcome=Outcome.ABORTED, tripped=1, stalled=1), headroom=0.0)
    told = {name for name in found if name.endswith("{run=train-0}")}
    counts = (
        "batches_total",
        "batch",
        "trips_total",
        "skipped_steps_total",
        "desynced_parameters_total",
        "differing_groups_total",
        "dropped_batches_total",
    )
    assert told == {f"rankwatch_{name}{{run=train-0}}" for name in counts}
    assert {state for state in RUN_STATES if found[f"rankwatch_run_state{{run=train-0,state={state}}}"]} == {"aborted"}
    assert found["rankwatch_runs"] == 0


def test_a_run_that_is_decided_but_not_over_is_running() -> None:
    found = values(shown(standing(), outcome=Outcome.LOST))
    assert {state for state in RUN_STATES if found[f"rankwatch_run_state{{run=train-0,state={state}}}"]} == {"running"}
    assert found["rankwatch_runs"] == 1


def test_before_the_first_batch_and_the_first_rank() -> None:
    found = values(shown(world_size=2))
    assert (found["rankwatch_batches_total{run=train-0}"], found["rankwatch_batch{run=train-0}"]) == (0, -1)
    assert found["rankwatch_ranks{run=train-0,state=missing}"] == 2
    assert found["rankwatch_standstill_seconds{run=train-0}"] == 0


def test_single_ranks_have_metrics_only_on_request() -> None:
    ranks = (standing(0, batch=3, silent=0.5, still=1.5, dropped=2, queued=1), standing(7, batch=1, state=RankState.LOST))
    assert not [name for name in values(shown(*ranks)) if "rank=" in name]
    found = values(shown(*ranks), per_rank=True)
    of_rank = {name: value for name, value in found.items() if "rank=0" in name}
    assert of_rank == {
        "rankwatch_rank_state{rank=0,run=train-0,state=running}": 1,
        "rankwatch_rank_batch{rank=0,run=train-0}": 3,
        "rankwatch_rank_silence_seconds{rank=0,run=train-0}": 0.5,
        "rankwatch_rank_standstill_seconds{rank=0,run=train-0}": 1.5,
        "rankwatch_rank_dropped_batches_total{rank=0,run=train-0}": 2,
        "rankwatch_rank_queued_messages{rank=0,run=train-0}": 1,
    }
    assert found["rankwatch_rank_state{rank=7,run=train-0,state=lost}"] == 1


def test_the_number_of_series_does_not_grow_with_the_world() -> None:
    few, many = (values(shown(*map(standing, range(size)))) for size in (2, 500))
    assert few.keys() == many.keys()


def test_the_metrics_of_the_collector() -> None:
    found = parsed(Readout((), LoopCounts(5, 500, 1, 64, 32), {Outcome.LOST: 2}, 0.25))
    assert {name: value for name, value in found.items() if "build_info" not in name} == {
        "rankwatch_runs": 0,
        "rankwatch_received_messages_total": 5,
        "rankwatch_received_bytes_total": 500,
        "rankwatch_refused_messages_total": 1,
        "rankwatch_put_off_bytes": 64,
        "rankwatch_unwritten_bytes": 32,
        "rankwatch_loop_age_seconds": 0.25,
        **{f"rankwatch_ended_runs_total{{outcome={each.value}}}": 2 * (each is Outcome.LOST) for each in Outcome},
    }


def test_job_names_cannot_break_out_of_their_label() -> None:
    found = values(shown(standing(), job='a"} 1\nrankwatch_runs 99'))
    assert found["rankwatch_runs"] == 1
    assert found['rankwatch_run_info{job=a"} 1\nrankwatch_runs 99,restart=0,run=train-0}'] == 1
