"""Zero code: scripts without any rankwatch code are watched, and behave as they do without rankwatch."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp

from jobs import RANKWATCH, SCRIPTS, Job, environment, finished, forked_apart, is_ours, run_job, torchrun
from ports import free_port
from rankwatch.attach import attached

pytestmark = pytest.mark.e2e

NAMES = {"", "head", *(f"blocks.{i}{part}" for i in range(3) for part in ("", ".0", ".1", ".2"))}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SCRIPT = str(SCRIPTS / "plain.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(torchrun("plain.py", "ddp"), id="ddp"),
        pytest.param(forked_apart("plain.py", "fsdp1"), id="fsdp1"),
        pytest.param([*TORCHRUN, "-m", "rankwatch.attach", "-m", "plain", "fsdp2"], id="fsdp2"),
        # The ranks of `spawn` have no RANK in their environment.
        pytest.param([sys.executable, SCRIPT, "spawn"], id="spawn"),
    ],
)
def test_the_model_is_found_and_named_as_the_user_wrote_it(command: list[str], tmp_path: Path) -> None:
    if "fsdp2" in command and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("torch.distributed.fsdp.fully_shard came with torch 2.6")
    (tmp_path / "options.toml").write_text("max_frames_to_save = 4\n")
    path = os.pathsep.join([environment()["PYTHONPATH"], str(SCRIPTS)])
    options = ("--rankwatch-config", str(tmp_path / "options.toml"))
    job = run_job(tmp_path, command, *options, env={"PYTHONPATH": path, "TEST_PORT": str(free_port())})
    assert job.code == 77, job.stderr
    verdict = job.verdict
    assert (verdict["rank"], verdict["batch"], verdict["optimizer_step"]) == (1, 3, 3)
    assert (verdict["module"], verdict["module_class"]) == ("blocks.0.1", "Square")
    assert (verdict["reading"], verdict["state"], verdict["cause"]) == ("output", "inf", "overflow")
    assert (job.run_dir.name, len(job.report["ranks"])) == ("forked-0" if "forked.py" in command[1] else "plain-0", 2)
    assert "Warning: 'rankwatch" not in job.stderr
    assert {frame["module"] for frame in job.report["frames"]} <= NAMES
    assert len(job.report["frames"]) == 4
    assert job.left_behind == []


FAILING = """
import os, sys, torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel as DDP
def load(batch, rank):
    if batch == 2 and rank == 1:
        return torch.ones(2, 3)
    return torch.ones(2, 4)
def train(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DDP(nn.Linear(4, 4))
    for batch in range(4):
        x = load(batch, rank)
        model(x).sum().backward()
if __name__ == "__main__":
    multiprocessing.spawn(train, nprocs=2)
"""


@pytest.mark.slow
def test_a_rank_that_fails_says_where(tmp_path: Path) -> None:
    """No exception leaves a process of ``spawn``: torch makes an exit of it."""
    script = tmp_path / "fails.py"
    script.write_text(FAILING)
    job = run_job(tmp_path, [sys.executable, str(script), str(free_port())])
    words = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x4)"
    assert job.report["reason"].endswith(f"failed: {words}, at fails.py:16 in train")
    failed = job.report["ranks"][1]
    assert (failed["farewell"], failed["farewell_at"]) == (words, "fails.py:16 in train")
    assert f": {words}, at fails.py:16 in train\n" in (job.run_dir / "report.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("how", ["direct", "eval", "frozen"])
def test_a_training_that_never_calls_its_root_in_training_mode_is_one_run(how: str, rank: str, tmp_path: Path) -> None:
    """Rank 0 alone evaluates between the batches, and forgets ``no_grad``."""
    job = run_job(tmp_path, forked_apart("parts.py", how, rank))
    assert job.code == 77, job.stderr
    verdict = job.verdict
    assert (verdict["rank"], verdict["batch"], verdict["optimizer_step"]) == (int(rank), 3, 0 if how == "frozen" else 3)
    assert (verdict["module"], verdict["state"], verdict["certainty"]) == ("decoder.1", "inf", "complete")
    runs = [folder.name for folder in (tmp_path / "runs").iterdir() if folder.is_dir() and not folder.is_symlink()]
    assert [name for name in runs if name.startswith("forked")] == ["forked-0"]
    assert (job.left_behind, "batch -1" in job.stderr, "before the first batch" in job.stderr) == ([], False, False)


def ended_well(path: Path, script: str) -> Job:
    path.write_text(script)
    job = run_job(path.parent, [sys.executable, str(path)])
    assert job.code == 0, job.stderr
    return job


UNUSED = """
import torch
from torch import nn
def main():
    features, head = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for batch in range(5):
        out = head(features(torch.ones(2, 4)).detach())
        features(torch.ones(1, 4))
        out.square().mean().backward()
        optimizer.step()
main()
"""


@pytest.mark.slow
def test_a_model_that_is_only_called_while_another_one_trains_has_no_report(tmp_path: Path) -> None:
    """Both are gone before the process ends."""
    job = ended_well(tmp_path / "frozen.py", UNUSED)
    runs = sorted(folder for folder in (tmp_path / "runs").iterdir() if folder.name.startswith("frozen"))
    assert [(run / "report.txt").exists() for run in runs] == [False, True]
    assert job.stderr.count(" finished: 1 rank, ") == 1
    assert "run frozen-0: dropped: no backward ever reached this model" in job.stderr


SHAPED = """
import torch
from torch import nn
features = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
model = nn.Sequential(features, nn.Linear(features(torch.ones(1, 4)).shape[1], 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in range(5):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_layer_that_was_called_for_its_shape_alone_has_no_report(tmp_path: Path) -> None:
    job = ended_well(tmp_path / "shaped.py", SHAPED)
    assert job.stderr.count(" finished: ") + job.stderr.count(" finished, ") == 1
    assert "run shaped-0: dropped: no backward ever reached this model" in job.stderr
    assert (job.report["outcome"], job.report["ranks"][0]["last_batch"]) == ("finished", 4)


PROBED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
model(torch.full((1, 4), float("nan")))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in range(5):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_bad_forward_before_the_training_is_noticed(tmp_path: Path) -> None:
    job = ended_well(tmp_path / "probed.py", PROBED)
    (noticed,) = job.report["notices"]
    assert "before a training: 0 (Linear), output: nan, as input[0] was nan, in batch 0: " in noticed["text"]


@pytest.fixture
def others(tmp_path: Path) -> str:
    """A PYTHONPATH with a sitecustomize of the user."""
    (tmp_path / "sitecustomize.py").write_text("WHO = 'the sitecustomize of the user'\n")
    return os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])


@pytest.mark.parametrize("how", ["0", "5", "raise", "kill", "exec"])
def test_strange_scripts_run_as_without_rankwatch(how: str, others: str) -> None:
    script = str(SCRIPTS / "strange.py")
    arguments = ["--an-option", "-m", "x y", how]
    bare, attached, as_module = (
        finished([sys.executable, "-B", *command], SCRIPTS, PYTHONPATH=others)
        for command in (
            [script, *arguments],
            ["-m", "rankwatch.attach", script, *arguments],
            ["-um", "rankwatch.attach", "-m", "strange", *arguments],
        )
    )
    assert (attached.returncode, attached.stdout, attached.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert "the sitecustomize of the user" in attached.stdout
    assert as_module.returncode == bare.returncode
    assert as_module.stderr.splitlines()[-1:] == bare.stderr.splitlines()[-1:]


RAISING = """
import torch, traceback
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.inner(x)
model = Model()
try:
    model(torch.ones(3))
except RuntimeError:
    traceback.print_exc()
model(torch.ones(2))
model(torch.ones(3))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="in Python 3.10 what is raised again has the traceback it had")
def test_tracebacks_of_a_training_contain_no_rankwatch_frame(tmp_path: Path) -> None:
    script = tmp_path / "raising.py"
    script.write_text(RAISING)
    bare, attached = (finished([sys.executable, *how, str(script)]) for how in ([], ["-m", "rankwatch.attach"]))
    assert attached.returncode == bare.returncode == 1
    expected, found = ([block.splitlines() for block in done.stderr.split("Traceback")[1:]] for done in (bare, attached))
    assert len(expected) == len(found) == 2  # the first one is from the forward in which the model was found
    sources = re.findall(r'File "(.+)", line', attached.stderr)
    assert sources
    assert not [source for source in sources if is_ours(source)]
    assert "rankwatch" not in re.sub(r'File ".+", line', "", attached.stderr)
    for one, other in zip(expected, found, strict=True):  # torch calls a module with hooks through other frames
        assert (one[:3], one[-3:]) == (other[:3], other[-3:])


TRAINING = """
import sys, torch, rankwatch
model = torch.nn.Linear(2, 2)
watch = rankwatch.watch(model, policy="strict")
rankwatch.DebugUnderflowOverflow(model)
for _ in range(3):
    model(torch.ones(2) * torch.inf).sum().backward()
print(rankwatch.detect_overflow(torch.ones(2) * torch.inf, "ctx"), watch.is_connected, "zmq" in sys.modules)
print(len(model._forward_hooks), len(model._forward_pre_hooks))
"""


@pytest.mark.slow
def test_when_disabled_nothing_is_watched_and_zmq_is_not_loaded(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    command = [*RANKWATCH, "run", "--runs-dir", str(tmp_path / "runs"), "--", sys.executable, "-m", "rankwatch.attach"]
    done = finished([*command, str(script)], RANKWATCH_MODE="disabled", RANKWATCH_CONNECTION="/no/such/file")
    assert (done.returncode, done.stdout) == (0, "False False False\n0 0\n"), done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "env", "complaint"),
    [
        ([], {}, "nothing to start; usage: torchrun ... -m rankwatch.attach [--rankwatch-config FILE] train.py ARGS"),
        (["-m"], {}, "nothing to start"),
        (["--config", "x", "train.py"], {}, "--config is no option of rankwatch.attach"),
        (["--rankwatch-config"], {}, "--rankwatch-config needs a file"),
        (["--rankwatch-config", "none.toml", "train.py"], {}, "none.toml: [Errno 2] No such file or directory"),
        (["--rankwatch-config=bad.toml", "x.py"], {}, "trace_batches is no option of rankwatch; did you mean trace_batch_nums?"),
        (["train.py"], {"RANKWATCH_POLICY": "lax"}, "RANKWATCH_POLICY='lax': expected one of first, strict, off"),
        (["train.py"], {"RANKWATCH_ATTACH": "yes"}, "RANKWATCH_ATTACH='yes': expected 0 or 1"),
        (["train.py"], {"RANKWATCH_MODE": "off"}, "RANKWATCH_MODE='off': expected enabled or disabled"),
    ],
)  # fmt: skip
def test_an_impossible_setup_is_reported_before_the_script_begins(
    arguments: list[str], env: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text("trace_batches = [3]\n")
    (tmp_path / "train.py").write_text("print('begun')\n")
    command = [sys.executable, "-m", "rankwatch.attach", *arguments]
    done = finished(command, tmp_path, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_script_says_wrong_of_the_log_ends_it_as_any_bad_option(tmp_path: Path) -> None:
    """Which no launcher has seen."""
    (tmp_path / "train.py").write_text(
        "import torch\nprint('begun')\ntorch.nn.Linear(1, 1)(torch.ones(1, 1))\nprint('trained')\n"
    )
    env = attached(environment()) | {"RANKWATCH_LOG_FORMAT": "yaml"}
    done = finished([sys.executable, "train.py"], tmp_path, env)
    assert (done.returncode, done.stdout) == (2, "begun\n")
    assert done.stderr.splitlines()[-1] == "rankwatch.errors.UsageError: RANKWATCH_LOG_FORMAT='yaml': expected text or json"
    assert "error of its own" not in done.stderr


def test_a_python_without_rankwatch_warns_where_torch_is_used_and_continues(tmp_path: Path) -> None:
    bare = f"{sys.base_prefix}/bin/python3"
    (tmp_path / "torch.py").write_text("print('torch')")
    code = "import sys; print(sys.argv); import torch"
    env = attached({"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)})
    done = finished([bare, "-c", code, "a"], None, env)
    assert done.stdout == "['-c', 'a']\ntorch\n"
    assert done.stderr == (
        f"rankwatch: this process is not watched: {bare} cannot import rankwatch (No module named 'rankwatch')\n"
    )


@pytest.mark.parametrize("command", [["tell.py", "a"], ["-m", "tell", "a"]])
def test_arguments_that_a_launcher_adds_reach_the_script(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text("import sys; print(sys.argv[1:])")
    launched = [sys.executable, "-m", "rankwatch.attach", "--local-rank=1", *command]
    done = finished(launched, tmp_path)
    assert (done.stdout, done.stderr) == ("['--local-rank=1', 'a']\n", "")


def test_module_finders_that_python_skips_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('torch')")
    code = "import sys; sys.meta_path.insert(1, type('Old', (), {'find_module': lambda *names: None})()); import torch"
    command = [f"{sys.base_prefix}/bin/python3", "-W", "ignore", "-c", code]
    env = attached({"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)})
    assert finished(command, None, env).stdout == "torch\n"
