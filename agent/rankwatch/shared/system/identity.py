"""This process's rank and job: from torchrun's environment, else the process group, else SLURM, else rank 0 of 1."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import UsageError
from ..printable import printable

# torchrun's run id where --rdzv-id was not given.
_NO_RUN_ID = {"", "none"}


@dataclass(frozen=True, slots=True)
class Identity:
    """A process and its job. ``job`` is empty if nothing in the environment names it."""

    job: str
    restart: int
    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int


def identify(environ: Mapping[str, str] | None = None, group: tuple[int, int] | None = None) -> Identity:
    """Reads the identity from ``environ`` (default: ``os.environ``).

    Args:
        group: rank and world size in torch.distributed, if there is a process group. It decides where the launcher set no
            ``RANK`` (``torch.multiprocessing.spawn``), and where the group is larger than ``WORLD_SIZE``: then ``RANK`` was
            inherited from the process that started this one.

    Raises:
        UsageError: a variable is no number, or the rank is not below the world size.
    """
    env = os.environ if environ is None else environ
    launched = _numbers(env, RANK=0, WORLD_SIZE=1, LOCAL_RANK=0) if "RANK" in env else None
    if launched is not None and (group is None or group[1] <= launched[1]):
        rank, world_size, local_rank = launched
    elif group is not None:
        rank, world_size = group
        (local_rank,) = _numbers(env, LOCAL_RANK=rank) if launched is None else (rank,)
    elif "SLURM_STEP_ID" in env:  # a task of srun; in the batch script, SLURM_NTASKS counts tasks that were not started
        rank, world_size, local_rank = _numbers(env, SLURM_PROCID=0, SLURM_NTASKS=1, SLURM_LOCALID=0)
    else:
        rank, world_size, local_rank = 0, 1, 0
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} does not lie in a world of {world_size}: check RANK and WORLD_SIZE")
    return Identity(
        job=printable(_job(env)),
        # A requeued SLURM job, or `rankwatch run`, starts torchrun anew, and its restart count begins at 0 again.
        restart=sum(_numbers(env, TORCHELASTIC_RESTART_COUNT=0, SLURM_RESTART_COUNT=0, RANKWATCH_RESTART=0)),
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=printable(socket.gethostname()),
        pid=os.getpid(),
    )


def unnamed_job(who: Identity) -> str:
    """A name for a job that has none: the same on all of its ranks, and different in other jobs."""
    if who.world_size > 1 and "MASTER_ADDR" in os.environ:
        return f"{os.environ['MASTER_ADDR']}-{os.environ.get('MASTER_PORT', '')}"
    starter = os.getppid() if who.world_size > 1 else who.pid  # the process that called mp.spawn, say
    return f"{who.host}-{starter}"


def safe_name(text: str) -> str:
    """``text`` as a file name: letters, digits, ``.``, ``_`` and ``-``; never empty, hidden or longer than 64."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".-")[:64] or "run"


def _job(env: Mapping[str, str]) -> str:
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    return env.get("RANKWATCH_JOB") or ("" if run_id in _NO_RUN_ID else run_id) or env.get("SLURM_JOB_ID", "")


def _numbers(env: Mapping[str, str], **defaults: int) -> list[int]:
    try:
        return [int(env.get(name, default)) for name, default in defaults.items()]
    except ValueError:
        found = ", ".join(f"{name}={env[name]!r}" for name in defaults if name in env)
        raise UsageError(f"not a whole number among {found}") from None
