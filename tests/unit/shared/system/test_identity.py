"""Rank and job from torchrun, SLURM, or a single process."""

from __future__ import annotations

import pytest

from rankwatch.errors import UsageError
from rankwatch.shared.system.identity import Identity, identify, safe_name


def place(who: Identity) -> tuple[str, int, int, int, int]:
    return who.job, who.restart, who.rank, who.world_size, who.local_rank


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("", 0, 0, 1, 0)),
        (TORCHRUN, ("", 0, 5, 8, 1)),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "exp", "TORCHELASTIC_RESTART_COUNT": "2"}, ("exp", 2, 5, 8, 1)),
        (SRUN, ("77", 0, 3, 4, 1)),
        ({**SRUN, **TORCHRUN, "SLURM_RESTART_COUNT": "1"}, ("77", 1, 5, 8, 1)),
        ({**SRUN, **TORCHRUN, "SLURM_RESTART_COUNT": "1", "RANKWATCH_RESTART": "2"}, ("77", 3, 5, 8, 1)),
        ({**TORCHRUN, "RANKWATCH_JOB": "mine", "TORCHELASTIC_RUN_ID": "exp"}, ("mine", 0, 5, 8, 1)),
        # The batch script itself is one process, whatever number of tasks the job requested.
        ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ("77", 0, 0, 1, 0)),
    ],
)
def test_place(environ: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    assert place(identify(environ)) == expected


@pytest.mark.parametrize(
    ("environ", "group", "expected"),
    [
        ({}, (3, 4), ("", 0, 3, 4, 3)),
        ({"LOCAL_RANK": "1"}, (3, 4), ("", 0, 3, 4, 1)),
        (TORCHRUN, (5, 8), ("", 0, 5, 8, 1)),
        # Each node or process has its own process group: torchrun's variables distinguish ranks that share one.
        (TORCHRUN, (1, 4), ("", 0, 5, 8, 1)),
        # The launcher started one process on each of two nodes; each spawned its node's ranks.
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (13, 16), ("", 0, 13, 16, 13)),
    ],
)
def test_place_in_a_process_group(
    environ: dict[str, str], group: tuple[int, int], expected: tuple[str, int, int, int, int]
) -> None:
    assert place(identify(environ, group)) == expected


def test_nonsense_is_named() -> None:
    with pytest.raises(UsageError, match="RANK='x'"):
        identify({"RANK": "x"})
    with pytest.raises(UsageError, match="rank 8 does not lie in a world of 8"):
        identify({"RANK": "8", "WORLD_SIZE": "8"})


@pytest.mark.parametrize(
    ("text", "name"), [("exp-1.2", "exp-1.2"), ("../../etc", "_.._etc"), ("", "run"), ("..", "run"), ("a/b c", "a_b_c")]
)
def test_safe_names(text: str, name: str) -> None:
    assert safe_name(text) == name
