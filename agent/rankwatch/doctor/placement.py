"""Which rank this process is, on which node, and where the store of the job is, from the environment of torchrun or srun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UsageError
from ..shared.system.identity import identify

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 10_000, 20_000
"""Under srun without torchrun nobody chooses the store's port: it is FIRST_PORT + SLURM_JOB_ID % PORTS."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank and its node. ``node`` differs between nodes even where their hosts have the same name."""

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
class StoreAddress:
    """The address of the store. ``is_opened_here``: this rank opens it, on any free port where ``port`` is 0."""

    host: str
    port: int
    is_opened_here: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def find_placement(env: Mapping[str, str]) -> Placement:
    """Raises UsageError: the environment contradicts itself."""
    who = identify(env)
    node = who.host
    if "RANK" in env:
        node = env.get("GROUP_RANK", node)
    elif "SLURM_STEP_ID" in env:
        node = env.get("SLURM_NODEID", node)
    return Placement(who.rank, who.world_size, who.local_rank, who.host, node, who.pid)


def find_store(env: Mapping[str, str], who: Placement) -> StoreAddress:
    """Raises UsageError: the environment names no address."""
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if "RANK" not in env and who.world_size == 1:
        return StoreAddress(LOOPBACK, 0, is_opened_here=True)
    if not host and (hosts := hosts_of_job(env)):
        host = hosts[0]
    if not port and env.get("SLURM_JOB_ID", "").isdecimal():
        port = str(FIRST_PORT + int(env["SLURM_JOB_ID"]) % PORTS)
    if not host or not port.isdecimal():
        raise UsageError(
            f"{who.world_size} ranks, and no place to meet: start them with torchrun or srun, or set MASTER_ADDR and MASTER_PORT"
        )
    has_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return StoreAddress(host, int(port), is_opened_here=who.rank == 0 and not has_agent)


def hosts_of_job(env: Mapping[str, str]) -> list[str]:
    """The hosts that SLURM gave the job; empty without SLURM."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    return expand(nodes) if nodes else []


def expand(nodes: str) -> list[str]:
    """The names in SLURM's list of nodes, such as ``gpu[01-03,7],head``."""
    names = []
    for prefix, ranges, suffix in re.findall(r"([^\[\],]+)(?:\[([^\]]*)\])?([^\[\],]*)", nodes):
        if not ranges:
            names.append(prefix + suffix)
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            names += [f"{prefix}{number:0{len(first)}}{suffix}" for number in range(int(first), int(last or first) + 1)]
    return names
