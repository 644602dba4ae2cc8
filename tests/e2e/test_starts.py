"""Who is a rank, and whose run it is: children, programs that replace themselves, relaunches, and jobs of one name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jobs import RANKWATCH, SCRIPTS, environment, run_job, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def children(tmp_path: Path, scenario: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "children.py"), str(tmp_path / "said"), scenario]


def test_a_child_of_a_rank_takes_no_seat(tmp_path: Path) -> None:
    job = run_job(tmp_path, children(tmp_path, "during"), "--job", "train", env=ONE)
    said = (tmp_path / "said").read_text()
    assert "during True" in said
    assert "child False" in said
    assert "which is rank 0: it is no rank, and is watched alone" in said
    assert (job.code, job.report["outcome"], len(list((tmp_path / "runs").glob("train*")))) == (0, "finished", 1)


def test_a_rank_that_replaces_itself_by_another_program_is_still_a_rank(tmp_path: Path) -> None:
    job = run_job(tmp_path, children(tmp_path, "exec"), "--job", "train", env=ONE)
    assert (tmp_path / "said").read_text() == "executed True\n"
    assert (job.code, job.run_dir.name, job.report["outcome"]) == (0, "train-0.2", "finished")


def test_a_command_that_a_rank_runs_under_a_collector_of_its_own_has_a_rank_of_its_own(tmp_path: Path) -> None:
    job = run_job(tmp_path, children(tmp_path, "nested"), "--job", "train", env=ONE)
    assert (tmp_path / "said").read_text() == "inner True\nnested True\n"
    assert (job.code, job.report["outcome"]) == (0, "finished")
    assert "refused" not in job.stderr


def test_ranks_that_were_given_the_private_connection_alone_are_those_of_the_command(tmp_path: Path) -> None:
    """As by ``mpirun -x`` or ``docker -e``: the launcher passes on what it is told to."""
    overflow = children(tmp_path, "child")
    job = run_job(tmp_path, ["sh", "-c", 'unset RANKWATCH_LAUNCH; "$@"; exit 1', "-", *overflow], "--job", "train", env=ONE)
    assert (job.code, job.run_dir.name, job.report["outcome"]) == (77, "train-0", "aborted")
    assert "rank connected" not in job.stderr


def test_launches_in_one_command_are_runs_of_their_own_and_the_last_one_decides(tmp_path: Path) -> None:
    overflow, healthy = (" ".join(torchrun("train.py", scenario)) for scenario in ("overflow", "healthy"))
    job = run_job(tmp_path, ["sh", "-c", f"{overflow}; {healthy}"], "--job", "train")
    assert (job.code, job.run_dir.name, job.report["outcome"]) == (0, "train-0.2", "finished")


def test_two_jobs_of_one_name_at_one_collector_never_touch_each_other(tmp_path: Path) -> None:
    """A stranger uses the connection file, and overflows: the command's exit code, and ``latest``, are of its own run."""
    file, word = tmp_path / "connection.json", tmp_path / "overflow"
    env = environment(FAULT_FILE=str(word), RANKWATCH_JOB="train")
    command = [*RANKWATCH, "run", "--runs-dir", str(tmp_path / "runs"), "--connection-file", str(file), "--"]
    stranger = [*RANKWATCH[:1], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    strange = " ".join([*stranger, str(SCRIPTS / "train.py"), "overflow"])
    own = " ".join(torchrun("train.py", "healthy"))
    script = f"(unset RANKWATCH_LAUNCH; {strange}; true); {own}; (unset RANKWATCH_LAUNCH; {strange}; true)"
    done = subprocess.run([*command, "sh", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "latest").resolve().name == "train-0.2"
    assert {run.name for run in (tmp_path / "runs").glob("train-0*")} == {"train-0", "train-0.2", "train-0.3"}
