"""What an archive says: the machines that go bad, and which modules, causes and versions recur. Pure, from few rows of sums.

A machine's incidents are the jobs and days on which it was suspected (``suspects.py``): a job that is started again
and again with the same fault counts once a day.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .chance import stands_out, tail


class Hours(NamedTuple):
    """For how many hours of its ranks a machine was seen. ``where``: a GPU's host, or how many GPUs a host has."""

    machine: str
    where: str
    hours: float


class Suspicion(NamedTuple):
    """Of a job on a day. ``gpu`` is empty where only the host is suspected; ``run`` is the last of that day's runs with it."""

    host: str
    gpu: str
    kind: str
    job: str
    day: str
    run: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A host or GPU with incidents.

    ``expected``: incidents that chance gives it in its hours. ``chance``: the probability of as many or more; see
    ``chance.py``. ``through``: the GPUs by which a host stands out, or the host by which a GPU does; empty: by itself.
    """

    name: str
    where: str
    incidents: int
    kinds: Mapping[str, int]
    jobs: int
    last_run: str
    last_day: str
    hours: float
    expected: float
    chance: float
    stands_out: bool
    through: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machines:
    """All hosts, or all GPUs: ``count`` of them had ``incidents`` in ``hours``. ``found``: those with incidents, the least
    likely first."""

    count: int
    hours: float
    incidents: int
    found: tuple[Machine, ...]

    @property
    def standing_out(self) -> tuple[Machine, ...]:
        return tuple(one for one in self.found if one.stands_out)

    @property
    def by_chance(self) -> tuple[Machine, ...]:
        return tuple(one for one in self.found if not one.stands_out)


class Recurring(NamedTuple):
    """A cause, or a module with its class: how many runs had it, of how many jobs, and in which run it was seen last."""

    name: str
    detail: str
    runs: int
    jobs: int
    last_run: str


class Version(NamedTuple):
    """Runs with these versions: how many there were, ended by a verdict, or had a suspect."""

    torch: str
    driver: str
    rankwatch: str
    runs: int
    verdicts: int
    suspects: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is said of an archive. ``runs`` were archived from ``first_day`` to ``last_day``."""

    url: str
    runs: int
    first_day: str
    last_day: str
    outcomes: Mapping[str, int]
    hosts: Machines
    gpus: Machines
    causes: tuple[Recurring, ...]
    modules: tuple[Recurring, ...]
    versions: tuple[Version, ...]
    damaged: tuple[str, ...] = ()
    """Files of which nothing could be read."""


def machines_of(hours: Sequence[Hours], incidents: Iterable[Suspicion], *, of_gpus: bool) -> Machines:
    """The hosts, or the GPUs, beside what chance gives each of them."""
    of_machines: dict[str, list[Suspicion]] = {}
    for incident in incidents:
        if name := incident.gpu if of_gpus else incident.host:
            of_machines.setdefault(name, []).append(incident)
    counts = {name: len(_occasions(some)) for name, some in of_machines.items()}
    everything, total = sum(counts.values()), sum(one.hours for one in hours)
    found = []
    for one in hours:
        if not (some := of_machines.get(one.machine)):
            continue
        # A machine whose runs ended at once has no hours: then its share is that of any machine.
        k, p = counts[one.machine], one.hours / total if one.hours > 0 else 1.0 / len(hours)
        last = max(some, key=lambda incident: (incident.day, incident.run))
        found.append(
            Machine(
                name=one.machine,
                where=one.where,
                incidents=k,
                kinds=dict(Counter(kind for kind, _, _ in {(other.kind, other.job, other.day) for other in some})),
                jobs=len({other.job for other in some}),
                last_run=last.run,
                last_day=last.day,
                hours=one.hours,
                expected=everything * p,
                chance=tail(k, everything, p),
                stands_out=stands_out(k, everything, p, len(hours)),
            )
        )
    found.sort(key=lambda machine: (machine.chance, -machine.incidents, machine.name))
    return Machines(len(hours), total, everything, tuple(found))


def attributed(hosts: Machines, gpus: Machines, incidents: Sequence[Suspicion]) -> tuple[Machines, Machines]:
    """The hosts and the GPUs, with what each stands out ``through``: a bad host makes its GPUs look bad, and a bad GPU its host.

    The same bound tells which it is. It is the host if a GPU has no more of its host's incidents than chance gives it among
    the GPUs there; it is the GPUs if the host would not stand out without them.
    """
    bad_hosts = {host.name: host for host in hosts.standing_out}
    on = {one.gpu: one.host for one in incidents}
    of_hosts = {name: _occasions(one for one in incidents if one.host == name and one.gpu) for name in bad_hosts}

    def through_host(gpu: Machine) -> tuple[str, ...]:
        host = bad_hosts.get(on[gpu.name])
        if host is None or host.hours <= 0:
            return ()
        is_alone = stands_out(gpu.incidents, len(of_hosts[host.name]), gpu.hours / host.hours, int(host.where))
        return () if is_alone else (host.name,)

    gpus = _with_through(gpus, through_host)
    bad_gpus = {gpu.name for gpu in gpus.standing_out if not gpu.through}

    def through_gpus(host: Machine) -> tuple[str, ...]:
        own = [one for one in incidents if one.host == host.name]
        rest = len(_occasions(one for one in own if one.gpu not in bad_gpus))
        p = host.hours / hosts.hours if hosts.hours > 0 else 1.0 / hosts.count
        through = sorted({one.gpu for one in own} & bad_gpus)
        return tuple(through) if through and not stands_out(rest, hosts.incidents, p, hosts.count) else ()

    return _with_through(hosts, through_gpus), gpus


def _with_through(machines: Machines, through: Callable[[Machine], tuple[str, ...]]) -> Machines:
    """Those that stand out by themselves come first."""
    found = [replace(one, through=through(one)) if one.stands_out else one for one in machines.found]
    return replace(machines, found=tuple(sorted(found, key=lambda one: (not one.stands_out, bool(one.through)))))


def _occasions(incidents: Iterable[Suspicion]) -> set[tuple[str, str]]:
    return {(one.job, one.day) for one in incidents}
