"""Runs a training under ``rankwatch run``, and compares its report with what its ranks noted of their own weights."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jobs import Job, forked, run_job
from rankwatch.shared.fingerprint import Fingerprint, FingerprintTable
from rankwatch.shared.frame import NO_STAGE
from rankwatch_monitor.decide.desync import DesyncPattern
from rankwatch_monitor.decide.replicas import ReplicaWatch

from .case import Case

Seen = Mapping[int, Mapping[str, str]]
"""By optimizer step: the checksum of each parameter of one rank."""

OF_REPLICAS = ("initialisation", "unsynchronised", "subset", "one-rank", "load", "unknown")


@dataclass(frozen=True)
class Judged:
    """``complaints``: what is not as it should be; ``named``: the step at which the first line was known, -1 without one."""

    case: Case
    job: Job
    losses: Sequence[float]
    complaints: list[str]
    named: int = -1

    @property
    def entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.job.report["desync"]
        return entries

    @property
    def lines(self) -> int:
        return len(notice_lines(self.job))


def judged(
    case: Case,
    folder: Path,
    *options: str,
    start: Callable[..., list[str]] = forked,
    is_bare: bool = False,
) -> Judged:
    """Runs and compares.

    The job itself must end as if nothing had happened, with a loss that fell. ``is_bare``: the training calls no ``watch``, and
    is found.
    """
    command = start("replicas.py", case.name, str(folder), *(["bare"] if is_bare else []), ranks=case.ranks)
    job = run_job(folder, command, *options)
    noted = [folder / f"rank{rank}.json" for rank in range(case.ranks)]
    ended = [json.loads(file.read_text()) for file in noted if file.exists()]
    losses = ended[0]["losses"] if ended else []
    found = [f"processes are left: {job.left_behind}"] if job.left_behind else []
    if job.code or len(ended) != case.ranks:
        return Judged(case, job, losses, [*found, f"exit code {job.code}: {job.stderr[-2000:]}"])
    if not sum(losses[-10:]) < sum(losses[:10]):
        found.append(f"the loss did not fall: {losses[:3]} to {losses[-3:]}")
    seen = [{int(step): values for step, values in rank["seen"].items()} for rank in ended]
    entries = job.report["desync"]
    found += _against_truth(case, entries, job) + _against_weights(case, entries, seen)
    sent = [pickle.loads((folder / f"rank{rank}.sent").read_bytes()) for rank in range(len(ended))]
    return Judged(case, job, losses, found, _named(sent))


def _named(sent: Sequence[Sequence[tuple[FingerprintTable, Fingerprint]]]) -> int:
    """The optimizer step whose fingerprints settled the first finding: the same decision again, one step after the other."""
    watch = ReplicaWatch(len(sent), lambda rank: ("", ""))
    for of_step in zip_longest(*sent):
        for rank, one in enumerate(of_step):
            if one is not None:
                watch.take_table(rank, one[0])
                watch.take(rank, NO_STAGE, one[1])
        if watch.findings.is_news:
            return max(one[1].step for one in of_step if one is not None)
    return -1


def _against_truth(case: Case, entries: Sequence[Mapping[str, Any]], job: Job) -> list[str]:
    truth = case.truth
    if not entries:
        return ["nothing is named"]
    first, found = entries[0], []
    if not all(entry["pattern"] in truth.pattern for entry in entries):
        found.append(f"pattern {sorted({entry['pattern'] for entry in entries})}, not {truth.pattern}")
    if truth.ranks and tuple(first["ranks"]) != truth.ranks:
        found.append(f"ranks {first['ranks']}, not {truth.ranks}")
    wrong = [entry["parameter"] for entry in entries if not entry["parameter"].startswith(truth.parameter)]
    if wrong:
        found.append(f"{wrong} named, which do not begin by {truth.parameter}")
    if truth.entries >= 0 and len(entries) != truth.entries:
        found.append(f"{len(entries)} entries, not {truth.entries}")
    if not truth.step <= first["step"] <= truth.step + truth.within:
        found.append(f"step {first['step']}, not {truth.step} to {truth.step + truth.within}")
    lines = notice_lines(job)
    if len(lines) != truth.lines if truth.lines >= 0 else not lines:
        found.append(f"{len(lines)} lines, not {truth.lines}: {lines}")
    if not truth.is_declared and any("inferred" not in line for line in lines):
        found.append(f"what is only inferred is said as if it were declared: {lines}")
    return found


def _against_weights(case: Case, entries: Sequence[Mapping[str, Any]], seen: Sequence[Seen]) -> list[str]:
    """Each entry must be true: at its step these ranks had other values than the other replicas, or than each other."""
    found = []
    for entry in entries:
        if entry["pattern"] not in OF_REPLICAS:
            continue
        groups = [group for group in case.groups if set(entry["ranks"]) <= set(group)]
        groups = groups or [group for group in case.groups if set(group) & set(entry["ranks"])]
        if not any(_differ(entry, group, seen) for group in groups):
            found.append(f"untrue: {dict(entry)}")
    return found


def _differ(entry: Mapping[str, Any], group: Sequence[int], seen: Sequence[Seen]) -> bool:
    values = {rank: named(seen[rank].get(entry["step"], {})).get(entry["parameter"]) for rank in group}
    named_ranks = [rank for rank in group if rank in entry["ranks"]]
    others = {value for rank, value in values.items() if rank not in named_ranks}
    if others:
        return len(others) == 1 and not others & {values[rank] for rank in named_ranks}
    return len({values[rank] for rank in named_ranks}) > 1


def named(values: Mapping[str, str]) -> dict[str, str]:
    """By the names in the model as it was before it was wrapped."""
    bare = {name.removeprefix("_orig_mod."): value for name, value in values.items()}
    return {name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): value for name, value in bare.items()}


def notice_lines(job: Job) -> list[str]:
    """What ``rankwatch run`` said of replicas while the job ran."""
    said = [line for line in job.stderr.splitlines() if " rankwatch: run " in line]
    return [line for line in said if any(f"; {pattern.value}: " in line for pattern in DesyncPattern)]
