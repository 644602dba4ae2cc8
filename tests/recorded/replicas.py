"""Runs the trainings of ``agreeing`` and ``desynced``, and records what their ranks send.

``PYTHONPATH=agent:monitor:tests python -m recorded.replicas [--compare] [TABLE | TABLE/NAME ...]``, from the repository's root.
Without names: all. ``--compare`` writes nothing, and says what is sent that is not as it was recorded; ``--truths`` runs
nothing, and only writes what the tables say of the trainings. A training whose report is not true is not recorded.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs import COMES_BACK, Job, Nursery, run_job
from trainings.table import AGREEING, DESYNCED

from .recording import Recording, file_of, in_turn, read, unframed
from .truths import FILE, Alike, untrue

CASES: dict[str, Any] = {"agreeing": AGREEING, "desynced": DESYNCED}
MODULES = ("trainings.table", "recorded.noting")
"""For the nursery."""


def said(job: Job) -> list[str]:
    """The lines of ``rankwatch run`` while the job ran."""
    return [line for line in job.stderr.splitlines() if " rankwatch: run " in line]


def run(
    start: Callable[..., list[str]], table: str, name: str, folder: Path, *options: str, is_bare: bool = False
) -> tuple[list[str], Recording]:
    """Runs a training under ``rankwatch run``; returns what is not as it should be, and what its ranks sent.

    The job itself must end as if nothing had happened. ``start`` makes its command, as ``jobs.forked`` does. ``is_bare``: the
    training calls no ``watch``, and is found.
    """
    case = CASES[table][name]
    command = start("training.py", table, name, str(folder), *(["bare"] if is_bare else []), ranks=case.ranks)
    job = run_job(folder, command, "--abort-grace", COMES_BACK, *options)
    found = [f"processes are left: {job.left_behind}"] if job.left_behind else []
    if job.code:
        return [*found, f"exit code {job.code}: {job.stdout}{job.stderr[-2000:]}"], Recording(())
    found += unequal_calls([json.loads((folder / f"calls{rank}.json").read_text()) for rank in range(case.ranks)])
    sent = in_turn(unframed((folder / "sent").read_bytes()))
    if table == "agreeing":
        return found + case.truth.complaints(job.report), Recording(sent)
    noted = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(case.ranks)]
    losses, entries = noted[0]["losses"], job.report["desync"]
    if not sum(losses[-10:]) < sum(losses[:10]):
        found.append(f"the loss did not fall: {losses[:3]} to {losses[-3:]}")
    alike = _alike([rank["seen"] for rank in noted])
    found += case.truth.truth.complaints(entries, said(job)) + untrue(entries, case.truth.groups, alike)
    return found, Recording(sent, alike)


def unequal_calls(noted: list[dict[str, tuple[str, int, int, list[str]]]]) -> list[str]:
    """Groups whose members have not called the same collectives. All ranks are at the same place of their script."""
    found: dict[str, dict[tuple[str, int, int], list[tuple[int, list[str]]]]] = {}
    for rank, groups in enumerate(noted):
        for key, (name, calls, digest, last) in groups.items():
            found.setdefault(key, {}).setdefault((name, calls, digest), []).append((rank, last))
    return [f"not the same calls: {sides}" for sides in found.values() if len(sides) > 1]


def complaints(start: Callable[..., list[str]], table: str, name: str, folder: Path) -> list[str]:
    """Runs a training; what is not true of its report, and what its ranks sent that is not as it was recorded."""
    found, recording = run(start, table, name, folder)
    return found or read(file_of(table, name)).differences(recording)


def _alike(seen: list[dict[str, dict[str, str]]]) -> Alike:
    """``seen``: of each rank, by step and parameter, a checksum."""
    found: dict[int, dict[str, list[int]]] = {}
    for step in sorted(set().union(*seen), key=int):
        of_ranks = [_as_watched(rank.get(step, {})) for rank in seen]
        for name in dict.fromkeys(name for values in of_ranks for name in values):
            values = [of_rank.get(name) for of_rank in of_ranks]
            found.setdefault(int(step), {})[name] = [values.index(value) for value in values]
    return found


def _as_watched(values: dict[str, str]) -> dict[str, str]:
    """By the names in the model as it was before it was wrapped."""
    bare = {name.removeprefix("_orig_mod."): value for name, value in values.items()}
    return {name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): value for name, value in bare.items()}


def truths() -> str:
    """What the tables call true: the text of ``truths.json``."""
    agree = {name: asdict(case.truth) for name, case in AGREEING.items()}
    differ = {name: asdict(case.truth) for name, case in DESYNCED.items()}
    return json.dumps({"agreeing": agree, "desynced": differ}).replace("}, ", "},\n").replace(": {", ":\n{", 1) + "\n"


def handle(nursery: Nursery, folder: Path, table: str, name: str, *, compares: bool) -> list[str]:
    """Records a training whose report is true, or compares it; returns what is wrong."""
    folder.mkdir(parents=True)
    if compares:
        return complaints(nursery.forked, table, name, folder)
    found, recording = run(nursery.forked, table, name, folder)
    if not found:
        recording.write(file_of(table, name))
    return found


def main(arguments: list[str]) -> int:
    options = {one for one in arguments if one.startswith("--")}
    names, compares, wrong = set(arguments) - options, "--compare" in options, 0
    if not compares:
        FILE.write_text(truths())
    if "--truths" in options:
        return 0
    every = [(table, name) for table, cases in CASES.items() for name in cases]
    meant = [one for one in every if not names or {one[0], "/".join(one)} & names]
    with tempfile.TemporaryDirectory() as folder, Nursery(Path(folder), *MODULES) as nursery, ThreadPoolExecutor(2) as pool:
        ran = pool.map(lambda one: handle(nursery, Path(folder, *one), *one, compares=compares), meant)
        for one, found in zip(meant, ran, strict=True):
            wrong += bool(found)
            print("wrong" if found else "right", "/".join(one), *[f"\n    {text}" for text in found], flush=True)
    print(f"{wrong} wrong of {len(meant)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
