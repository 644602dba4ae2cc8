"""Archives of invented runs, written by the archive's own writer: many with incidents by chance, a bad GPU and a bad host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from typing import Any

from rankwatch_fleet.archive import put
from rankwatch_fleet.layout import MERGED, file_of, folder_of, id_of

FIRST_DAY = date(2025, 1, 1)
LOCAL = 8
"""Ranks, and GPUs, of a host."""

BAD_GPU, BAD_HOST = (5, 3), 11
"""The host and the local rank of the bad GPU; the bad host. Small sites have fewer than 12 hosts: their last one is bad."""

CHANCE, BAD = 0.02, 0.08
"""The share of the runs that have an incident somewhere, and of the runs on what is bad that have one there."""

CAUSES = ("overflow", "overflow", "overflow", "invalid", "data", "weight", "gradient", "divergence")


def host_name(number: int) -> str:
    return f"gpu{number:03}"


def gpu_name(host: int, local: int) -> str:
    return f"GPU-{host:04x}{local:04x}-9f1e-4c11-8d20-5f3a00000000"


def write(
    url: str, runs: int, *, hosts: int = 128, jobs: int = 20, days: int = 365, seed: int = 1, merged: bool = True
) -> None:
    """Writes that many runs, spread over these jobs and days: a file for each job and day, or one for each run."""
    chosen = random.Random(seed)
    for day in range(days):
        for job in range(jobs):
            count = runs // (days * jobs) + (day * jobs + job < runs % (days * jobs))
            rows = [_run(chosen, hosts, FIRST_DAY + timedelta(day), f"job-{job}", number) for number in range(count)]
            folder = folder_of(FIRST_DAY + timedelta(day), f"job-{job}")
            for name, some in [(f"{MERGED}.parquet", rows)] if merged else [(file_of(row["id"]), [row]) for row in rows]:
                if some:
                    put(url, folder, name, some)


def _run(chosen: random.Random, hosts: int, day: date, job: str, number: int) -> dict[str, Any]:
    began = datetime(day.year, day.month, day.day, tzinfo=timezone.utc) + timedelta(seconds=chosen.randrange(86_400))
    hours = chosen.expovariate(1 / 6)
    on = chosen.sample(range(hosts), min(hosts, chosen.choice((1, 1, 2, 4))))
    suspects = list(_suspects(chosen, on, hosts))
    cause = chosen.choice(CAUSES) if not suspects and chosen.random() < 0.03 else None
    torch, driver = chosen.choice(("2.13.0", "2.14.1")), chosen.choice(("550.54.15", "570.86.10"))
    return {
        "id": id_of(f"{job}-{number}", day, chosen.random()),
        "run": f"{job}-{number}",
        "archived": began + timedelta(hours=hours),
        "began": began,
        "ended": began + timedelta(hours=hours),
        "restart": 0,
        "model": 0,
        "world_size": LOCAL * len(on),
        "batches": int(hours * 3600),
        "outcome": "lost" if suspects else "aborted" if cause else "finished",
        "reason": "",
        "rankwatch": "0.1.0",
        "torch": torch,
        "driver": driver,
        "verdict": _verdict(chosen, cause) if cause else None,
        "suspects": suspects,
        "ranks": [
            _rank(host, local, LOCAL * index + local, hours, driver)
            for index, host in enumerate(on)
            for local in range(LOCAL)
        ],
        "notices": [],
        "desync": [],
        "digests": [{"batch": batch, "batches": 1000, "headroom": 4.5, "bad": 0} for batch in range(0, 8000, 1000)],
    }


def _suspects(chosen: random.Random, on: list[int], hosts: int) -> Iterator[dict[str, Any]]:
    kinds = ("lost", "lost", "lost", "one-replica", "did-not-recur")
    if chosen.random() < CHANCE:
        yield _suspect(chosen.choice(kinds), chosen.choice(on), chosen.randrange(LOCAL))
    if BAD_GPU[0] in on and chosen.random() < BAD:
        yield _suspect(chosen.choice(kinds[3:]), *BAD_GPU)
    if (bad := min(BAD_HOST, hosts - 1)) in on and chosen.random() < BAD:
        yield _suspect("lost", bad, chosen.randrange(LOCAL))


def _suspect(kind: str, host: int, local: int) -> dict[str, Any]:
    return {"kind": kind, "rank": local, "host": host_name(host), "gpu": gpu_name(host, local)}


def _rank(host: int, local: int, rank: int, hours: float, driver: str) -> dict[str, Any]:
    gpu = gpu_name(host, local)
    return {
        "rank": rank, "local_rank": local, "host": host_name(host), "gpu": gpu, "gpu_name": "NVIDIA H200", "gpu_uuid": gpu,
        "pci_bus": f"0000:{local:02x}:00.0", "driver": driver, "torch": "2.14.1", "state": "finished", "last_batch": 100,
        "hours": hours,
    }  # fmt: skip


def _verdict(chosen: random.Random, cause: str) -> dict[str, Any]:
    layer = chosen.randrange(48)
    return {
        "rank": 0, "host": host_name(0), "module": f"blocks.{layer}.ffn", "module_class": "Linear", "cause": cause,
        "phase": "forward", "reading": "output", "state": "inf", "dtype": "float16", "certainty": "complete",
    }  # fmt: skip
