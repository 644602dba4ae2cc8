"""The start: which launch of its job a rank belongs to. It is the same on all ranks of a launch, and new at the next one.

Its id comes from ``RANKWATCH_START`` if set, else from the job's own store: of the ranks, the first to ask writes a random id,
and nobody waits for another one. Before ``init_process_group`` and without torchrun's store there is none; then it is made of
what the environments of all ranks share.

A store may outlive a launch: that of torchrun's agents does, and their restart counts do not tell launches apart, since each
agent counts the failures of its own ranks. So each rank takes a place under the id. Where the place is another process's, that
has ended, the id is of an earlier launch, and the rank writes a new one.
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
    """``job`` and ``restart``: the names of the launch, as its first rank knew them."""

    id: str
    job: str
    restart: int


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
    key, expected = f"rankwatch/start/{who.world_size}", ""
    for _ in range(MAX_EARLIER):
        new = json.dumps(unknown._replace(id=os.urandom(8).hex()))
        found: str = store.compare_set(key, expected, new).decode()
        start = Start(*json.loads(found))
        if _takes_place(store, start, who, node):
            return start._replace(id=start.id[:MAX_START])
        expected = found
    raise RuntimeError("the job is launched again and again")


def _takes_place(store: Any, start: Start, who: Identity, node: str) -> bool:
    """Whether this process may be a rank of this launch."""
    here = f"{who.host} {machine()}"
    agent, own = f"{here} {who.restart}", f"{here} {who.pid} {started_at(who.pid)}"
    if node and _first(store, f"rankwatch/node/{start.id}/{node}", agent) != agent:
        return False
    held = _first(store, f"rankwatch/rank/{start.id}/{who.rank}", own)
    where, pid, began = held.rsplit(" ", 2)
    is_rival = where == here and began == str(started_at(int(pid)))  # only one of the two is the rank
    return held == own or is_rival


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
