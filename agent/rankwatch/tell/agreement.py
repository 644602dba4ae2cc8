"""The start id: which launch of its job a rank belongs to. It is the same on all ranks of a launch, and new at the next one.

It comes from ``RANKWATCH_START`` if set, else from the job's own store: of the ranks, the first to ask writes a random id, and
nobody waits for another one. Before ``init_process_group`` and without torchrun's store there is none; then it is made of what
the environments of all ranks share.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from ..shared.identity import Identity
from ..shared.messages import MAX_START
from ..shared.process import boot_id, started_at

log = logging.getLogger(__name__)

TIMEOUT = 3.0
"""Seconds that the training waits for the store, if it does not answer."""

UNKNOWN = ""
"""The collector then goes by the names."""


def start_of(who: Identity, group: tuple[int, int] | None, environ: Mapping[str, str] | None = None) -> str:
    """The start id of this rank.

    Args:
        group: rank and world size in torch.distributed, if there is a process group.
    """
    env = os.environ if environ is None else environ
    if given := env.get("RANKWATCH_START"):
        return "".join(letter for letter in given if letter.isprintable())[:MAX_START]
    if who.world_size == 1:
        return _digest(who.host, boot_id(), str(who.pid), str(started_at(who.pid)))
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("WORLD_SIZE") == str(who.world_size):
        return _within_timeout(lambda: _agree(_agents_store(env), f"rankwatch/start/{who.restart}"))
    if group == (who.rank, who.world_size):
        return _within_timeout(lambda: _agree(_groups_store(), "rankwatch/start"))
    return shared_start(who, env)


def shared_start(who: Identity, env: Mapping[str, str]) -> str:
    """A start id made of what all ranks of a launch have in common, or UNKNOWN. Two launches may have the same one."""
    if "SLURM_STEP_ID" in env:
        return _digest("slurm", *(env.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")))
    if "MASTER_ADDR" not in env:
        return UNKNOWN
    master = env["MASTER_ADDR"], env.get("MASTER_PORT", "")
    machine = (who.host, boot_id(), str(os.getuid())) if _is_loopback(env["MASTER_ADDR"]) else ()
    return _digest("master", *master, env.get("TORCHELASTIC_RUN_ID", ""), *machine)


def _agree(store: Any, key: str) -> str:
    """The id that the first rank wrote."""
    found: bytes = store.compare_set(key, "", os.urandom(8).hex())
    return found.decode()[:MAX_START]


def _agents_store(env: Mapping[str, str]) -> Any:
    """The store of torchrun's agents, which is there before the ranks are."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=TIMEOUT)
    return TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timeout, wait_for_workers=False)


def _groups_store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _within_timeout(agree: Callable[[], str]) -> str:
    found: list[str] = []

    def run() -> None:
        try:
            found.append(agree())
        except Exception as error:  # noqa: BLE001 (torch raises many kinds, and the training must start)
            log.debug("no start id from the job's store: %s", error)

    thread = threading.Thread(target=run, name="rankwatch-agreement", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return found[0] if found else UNKNOWN


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:16]
