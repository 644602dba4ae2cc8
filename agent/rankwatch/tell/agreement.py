"""The start: which launch of its job a rank belongs to. It is the same on all ranks of a launch, and new at the next one.

A launch is a round of torchrun's rendezvous: what all ranks of a round share, and no earlier round has. Nothing in their
environment is that. ``TORCHELASTIC_RUN_ID``, ``MASTER_ADDR`` and, with torchrun's own store, ``MASTER_PORT`` are the same in all
rounds; ``TORCHELASTIC_RESTART_COUNT`` counts what one agent saw fail; ``GROUP_WORLD_SIZE`` comes back when a node does. The store
of the rendezvous has a number of the round, but no rank knows its address, and keys of the process group stay from round to
round. What does tell rounds apart: no agent begins a round before it has ended its ranks of the one before. So a process that
has ended is of an earlier round than one that asks.

The id comes from ``RANKWATCH_START`` if set, else from the job's own store: of the ranks, the first to ask writes a random id,
and nobody waits for another one. Each takes its place under the id, and one for its agent. If a place there is another
process's, that has ended, the id is of an earlier launch: the rank writes a new one, with the id ``earlier`` that it takes over
from. A rank whose places are free in the earlier id, as it never came so far, takes that one unknowingly. Then the collector puts
it right (``decide/launch/launches.py``): it knows which ranks have ended, and by ``earlier`` which two ids are one launch.

Why this holds where a launch is not the first one:

- A rank dies before it asks, and asks first in the next round: as above.
- Agents count restarts differently, also with one ``RANKWATCH_START`` for all: counts are for show, and are no part of a key.
- More or fewer nodes, or one that is replaced: another world size has another key in the store. In the same world size a place
  is held by a process of another host, or by one that has ended.
- A static rendezvous has no rounds: agents start their ranks again at will. A rank that takes a free place beside ranks that
  still wait for it is one of theirs; one whose predecessor had asked begins a launch, which the others' restart joins.
- The store goes away in the middle: the start of those that ask later is unknown, and the collector goes by the names.
- Without torchrun's store (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``), each round has its own ``MASTER_PORT`` and group's store.
- Before ``init_process_group`` and without torchrun's store there is no store; then the id is made of what the environments of
  all ranks share. It may be that of the launch before; the collector tells the two apart by the ages of their processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from ..shared.link.connection import is_loopback
from ..shared.system.identity import Identity
from ..shared.system.process import boot_id, machine, started_at
from ..shared.types.messages import MAX_START

log = logging.getLogger(__name__)

TIMEOUT = 3.0
"""Seconds that the training waits for the store, if it does not answer."""

UNKNOWN = ""
"""The collector then goes by the names."""

MAX_EARLIER = 8
"""Launches that begin while a rank asks which one is its own."""


class Start(NamedTuple):
    """``job`` and ``restart``: the names of the launch, as its first rank knew them. ``earlier``: the id of the launch before, if
    that was found in the store."""

    id: str
    job: str
    restart: int
    earlier: str = ""


def start_of(who: Identity, group: tuple[int, int] | None, job: str, environ: Mapping[str, str] | None = None) -> Start:
    """The start of this rank.

    Args:
        group: rank and world size in torch.distributed, if there is a process group.
        job: the name of the job, as this rank knows it.
    """
    env = os.environ if environ is None else environ
    if given := env.get("RANKWATCH_START"):
        return Start("".join(letter for letter in given if letter.isprintable())[:MAX_START], job, who.restart)
    if who.world_size == 1:
        return Start(_digest(who.host, boot_id(), str(who.pid), str(started_at(who.pid))), job, who.restart)
    unknown = Start(UNKNOWN, job, who.restart)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("WORLD_SIZE") == str(who.world_size):
        return _within_timeout(lambda: _agree(_agents_store(env), unknown, who, env.get("GROUP_RANK", ""))) or unknown
    if group == (who.rank, who.world_size):
        from torch.distributed import distributed_c10d

        return _within_timeout(lambda: _agree(distributed_c10d._get_default_store(), unknown, who)) or unknown
    return unknown._replace(id=shared_start(who, env))


def shared_start(who: Identity, env: Mapping[str, str]) -> str:
    """A start id made of what all ranks of a launch have in common, or UNKNOWN. Two launches may have the same one."""
    if "SLURM_STEP_ID" in env:
        return _digest("slurm", *(env.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")))
    if "MASTER_ADDR" not in env:
        return UNKNOWN
    master = env["MASTER_ADDR"], env.get("MASTER_PORT", "")
    machine = (who.host, boot_id(), str(os.getuid())) if is_loopback(env["MASTER_ADDR"]) else ()
    return _digest("master", *master, env.get("TORCHELASTIC_RUN_ID", ""), *machine)


def _agree(store: Any, unknown: Start, who: Identity, node: str = "") -> Start:
    """The start that the first rank wrote, if it is of this launch, else a new one. ``node``: the number of torchrun's agent."""
    key, expected, earlier = f"rankwatch/start/{who.world_size}", "", ""
    for _ in range(MAX_EARLIER):
        new = json.dumps(unknown._replace(id=os.urandom(8).hex(), earlier=earlier))
        found: str = store.compare_set(key, expected, new).decode()
        start = Start(*json.loads(found))
        if _takes_place(store, start, who, node):
            return start._replace(id=start.id[:MAX_START], earlier=start.earlier[:MAX_START])
        expected, earlier = found, start.id
    raise RuntimeError("the job is launched again and again")


def _takes_place(store: Any, start: Start, who: Identity, node: str) -> bool:
    """Whether this process may be a rank of this launch: neither its predecessor nor one of its agent's other ranks has ended."""
    of_agent = [f"rankwatch/node/{start.id}/{node}"] if node else []
    return all(_is_of_this_launch(store, place, who) for place in (*of_agent, f"rankwatch/rank/{start.id}/{who.rank}"))


def _is_of_this_launch(store: Any, place: str, who: Identity) -> bool:
    """Whether this place is free, or held by a process that runs here: of two with one rank, one alone is the rank."""
    here = f"{who.host} {machine()}"
    where, pid, began = _first(store, place, f"{here} {who.pid} {started_at(who.pid)}").rsplit(" ", 2)
    return where == here and began == str(started_at(int(pid)))


def _first(store: Any, key: str, own: str) -> str:
    """What was written first under this key: by another process, or now."""
    written: bytes = store.compare_set(key, "", own)
    return written.decode()


def _agents_store(env: Mapping[str, str]) -> Any:
    """The store of torchrun's agents, which is there before the ranks are."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=TIMEOUT)
    return TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timeout, wait_for_workers=False)


def _within_timeout(agree: Callable[[], Start]) -> Start | None:
    found: list[Start] = []

    def run() -> None:
        try:
            found.append(agree())
        except Exception as error:  # noqa: BLE001 (torch raises many kinds, and the training must start)
            log.debug("no start id from the job's store: %s", error)

    thread = threading.Thread(target=run, name="rankwatch-agreement", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return found[0] if found else None


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:16]
