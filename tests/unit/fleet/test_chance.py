"""The binomial bound, beside exact fractions and beside many fleets of equally good machines."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest

from rankwatch_fleet.chance import LEVEL, stands_out, tail
from rankwatch_fleet.findings import Hours, Suspicion, attributed, machines_of


def exact(k: int, n: int, p: Fraction) -> Fraction:
    return sum((math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1)), Fraction(0))


@pytest.mark.parametrize("n", [0, 1, 7, 60])
@pytest.mark.parametrize("p", [Fraction(1, 1000), Fraction(1, 8), Fraction(1, 2), Fraction(9, 10)])
def test_it_is_the_binomial_tail(n: int, p: Fraction) -> None:
    for k in range(n + 2):
        assert tail(k, n, float(p)) == pytest.approx(float(exact(k, n, p)), rel=1e-9, abs=1e-300)


def test_the_ends() -> None:
    assert (tail(0, 5, 0.0), tail(1, 5, 0.0), tail(5, 5, 1.0), tail(6, 5, 0.5)) == (1.0, 0.0, 1.0, 0.0)
    assert tail(10, 10_000_000, 0.5) == 1.0
    assert tail(9_000, 1_000_000, 0.001) == 0.0
    assert tail(1_050, 1_000_000, 0.001) == pytest.approx(0.0592, abs=0.0005)


def test_one_incident_never_stands_out() -> None:
    assert not stands_out(1, 1, 1e-9, 2)
    assert stands_out(2, 2, 1e-9, 2)


def fleet(counts: dict[int, int], machines: int = 100) -> list[Suspicion]:
    """Incidents of machines that were there equally long."""
    return [
        Suspicion(f"h{machine}", f"g{machine}", "lost", f"job-{number}", "2026-01-31", "train-0")
        for machine, count in counts.items()
        for number in range(count)
    ]


HOURS = [Hours(f"h{machine}", "", 10.0) for machine in range(100)]


def test_of_equally_good_machines_hardly_any_stands_out() -> None:
    chosen = random.Random(7)
    named = 0
    for _ in range(300):
        counts = Counter(chosen.randrange(100) for _ in range(60))
        named += bool(machines_of(HOURS, fleet(counts), of_gpus=False).standing_out)
    assert named <= 2 * LEVEL * 300


def test_a_bad_one_among_them_is_named() -> None:
    found = machines_of(HOURS, fleet({**dict.fromkeys(range(30), 1), 40: 7}), of_gpus=False)
    (bad,) = found.standing_out
    assert (bad.name, bad.incidents, bad.kinds, bad.jobs) == ("h40", 7, {"lost": 7}, 7)
    assert bad.expected == pytest.approx(0.37)
    assert len(found.by_chance) == 30
    assert found.found[0] is bad


def test_a_machine_that_was_there_longer_may_have_more() -> None:
    hours = [*HOURS[:-1], HOURS[-1]._replace(hours=500.0)]
    assert not machines_of(hours, fleet({**dict.fromkeys(range(30), 1), 99: 12}), of_gpus=False).standing_out


def test_a_machine_without_hours_stands_out_by_its_count_alone() -> None:
    hours = [*HOURS[:-1], HOURS[-1]._replace(hours=0.0)]
    background = dict.fromkeys(range(30), 1)
    assert not machines_of(hours, fleet({**background, 99: 2}), of_gpus=False).standing_out
    assert machines_of(hours, fleet({**background, 99: 9}), of_gpus=False).standing_out


def test_a_job_that_is_started_again_counts_once_a_day() -> None:
    again = [one._replace(job="train", run=f"train-{number}") for number, one in enumerate(fleet({40: 9}))]
    found = machines_of(HOURS, [*fleet(dict.fromkeys(range(30), 1)), *again], of_gpus=False)
    assert not found.standing_out
    assert next(one.incidents for one in found.found if one.name == "h40") == 1


def of_a_site(*incidents: list[Suspicion]) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """What stands out among 100 hosts of 8 GPUs each, and through what: of the hosts, and of the GPUs."""
    some = [one for part in incidents for one in part]
    hours = [Hours(f"h{host}", "8", 80.0) for host in range(100)]
    of_gpus = [Hours(f"h{host}g{gpu}", f"h{host}", 10.0) for host in range(100) for gpu in range(8)]
    machines = machines_of(hours, some, of_gpus=False), machines_of(of_gpus, some, of_gpus=True)
    hosts, gpus = attributed(*machines, some)
    assert (len(hosts.found), len(gpus.found)) == tuple(len(one.found) for one in machines)
    return tuple({one.name: one.through for one in found.standing_out} for found in (hosts, gpus))  # type: ignore[return-value]


def on(host: int, gpus: Sequence[int], job: str) -> list[Suspicion]:
    """An incident on each of these GPUs of a host."""
    return [
        Suspicion(f"h{host}", f"h{host}g{gpu}", "lost", f"{job}-{number}", "2026-01-31", "train-0")
        for number, gpu in enumerate(gpus)
    ]


BACKGROUND = [one for host in range(30) for one in on(host, [host % 8], f"of-{host}")]


def test_a_bad_gpu_makes_its_host_look_bad() -> None:
    assert of_a_site(BACKGROUND, on(40, [3] * 8, "bad")) == ({"h40": ("h40g3",)}, {"h40g3": ()})


def test_a_bad_host_makes_its_gpus_look_bad() -> None:
    hosts, gpus = of_a_site(BACKGROUND, on(40, [*range(8)] * 4, "bad"))
    assert hosts == {"h40": ()}
    assert gpus == {f"h40g{gpu}": ("h40",) for gpu in range(8)}


def test_a_bad_gpu_on_a_bad_host() -> None:
    hosts, gpus = of_a_site(BACKGROUND, on(40, [*range(8)] * 4, "bad"), on(40, [3] * 30, "worse"))
    assert hosts == {"h40": ()}
    assert gpus["h40g3"] == ()


def test_incidents_of_the_host_alone() -> None:
    without = [one._replace(gpu="") for one in on(40, [0] * 9, "bad")]
    assert of_a_site(BACKGROUND, without) == ({"h40": ()}, {})
