"""Where a rank is, and where the ranks meet: read from the environment of torchrun or srun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UsageError
from ..shared.identity import Identity, identify

LOOPBACK = "127.0.0.1"
PORTS = 10_000, 20_000
"""Where srun alone starts the ranks, they meet on a port from here on, by the job's number; so many of them."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank and the node that it is on. ``node`` tells nodes apart whose hosts are called the same."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    node: str
    pid: int

    @property
    def tag(self) -> str:
        return f"[{self.host}-{self.local_rank}]"


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address of the store, and whether this rank has to open it (port 0 picks one)."""

    host: str
    port: int
    is_opened_here: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def find_place(env: Mapping[str, str]) -> Place:
    """Raises UsageError: the environment makes no sense."""
    who = identify(env)
    node = who.host
    if "RANK" in env:
        node = env.get("GROUP_RANK", node)
    elif "SLURM_STEP_ID" in env:
        node = env.get("SLURM_NODEID", node)
    return Place(who.rank, who.world_size, who.local_rank, who.host, node, who.pid)


def find_meeting(env: Mapping[str, str], who: Identity | Place) -> Meeting:
    """Where the ranks meet. Raises UsageError: nothing in the environment tells."""
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if "RANK" not in env and who.world_size == 1:
        return Meeting(LOOPBACK, 0, is_opened_here=True)
    if not host and (nodes := env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")):
        host = expand(nodes)[0]
    if not port and env.get("SLURM_JOB_ID", "").isdecimal():
        port = str(PORTS[0] + int(env["SLURM_JOB_ID"]) % PORTS[1])
    if not host or not port.isdecimal():
        raise UsageError(
            f"{who.world_size} ranks, and no place to meet: start them with torchrun or srun, or set MASTER_ADDR and MASTER_PORT"
        )
    has_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Meeting(host, int(port), is_opened_here=who.rank == 0 and not has_agent)


def hosts_of_job(env: Mapping[str, str]) -> list[str]:
    """The hosts that SLURM gave the job; empty without SLURM."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    return expand(nodes) if nodes else []


def expand(nodes: str) -> list[str]:
    """SLURM's list of nodes, ``gpu[01-03,7],head``, one by one."""
    names = []
    for prefix, ranges, suffix in re.findall(r"([^\[\],]+)(?:\[([^\]]*)\])?([^\[\],]*)", nodes):
        if not ranges:
            names.append(prefix + suffix)
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            names += [f"{prefix}{number:0{len(first)}}{suffix}" for number in range(int(first), int(last or first) + 1)]
    return names
