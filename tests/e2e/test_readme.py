"""Every command of the README runs, and every piece of its Python is Python."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

from jobs import INTERPRETER, RANKWATCH, ROOT, environment
from rankwatch.shared.config import FUNCTIONS, Config
from rankwatch.shared.notice import Notice, NoticeKind, describe_notice

pytestmark = pytest.mark.e2e

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()]
PYTHON = [block for language, block in BLOCKS if language == "python"]

INSTALL_AND_DEMO, INSTALL_AND_TEST = (command for command in COMMANDS if command.startswith("python3 -m venv"))
COLLECTOR = next(command for command in COMMANDS if command.startswith("rankwatch collector"))
ONE_OF_TWO_NODES = next(command for command in COMMANDS if "--nnodes" in command)
TUNE = [command for command in COMMANDS if command.startswith("rankwatch tune")]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]
UI = next(command for command in COMMANDS if command.startswith("rankwatch ui"))
IN_ORDER = [
    command
    for command in COMMANDS
    if command not in (INSTALL_AND_DEMO, INSTALL_AND_TEST, COLLECTOR, ONE_OF_TWO_NODES, UI, *TUNE)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with the README's training in it."""
    (tmp_path / "train.py").write_text(next(block for block in PYTHON if block.startswith("# train.py")))
    (tmp_path / "shared").mkdir()
    return tmp_path


def shell_environment(folder: Path) -> dict[str, str]:
    """An environment in which ``rankwatch`` and ``torchrun`` are this Python's."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, module in (("rankwatch", "rankwatch_monitor"), ("torchrun", "torch.distributed.run")):
        (tools / name).write_text(f'#!/bin/sh\nexec {INTERPRETER} -m {module} "$@"\n')
        (tools / name).chmod(0o755)
    return environment(PATH=f"{tools}:{os.environ['PATH']}", MASTER_PORT=str(free_port()))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_ci_runs_the_two_commands_of_the_readme() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-3:] == [INSTALL_AND_DEMO, INSTALL_AND_TEST, ".venv/bin/python -m pytest -m slow"]
    assert 'cd "$folder/rankwatch"' in lines  # the name that `git clone` gives the folder


def test_the_demo(tmp_path: Path) -> None:
    assert INSTALL_AND_DEMO.endswith("&& .venv/bin/rankwatch demo")
    done = subprocess.run(
        [*RANKWATCH, "demo"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    verdict = json.loads((tmp_path / "rankwatch-runs" / "latest" / "report.json").read_text())["verdict"]
    assert (verdict["rank"], verdict["cause"], verdict["dtype"]) == (1, "overflow", "float16")
    assert verdict["module"] == "decoder.block.1.layer.1.DenseReluDense.dropout"
    # The report on top of the README is the demo's, but for this machine's name and what was left out.
    shown = README.split("```\n")[1].split("\nDetected")[0]
    for line in shown.splitlines():
        for fixed in re.split(r"\(vm,|batch \d+.*|abs max .*|acknowledged in.*", line):
            assert fixed in done.stdout
    assert "this was the demo: its planted overflow was caught" in done.stdout
    command = [*RANKWATCH, "diff", "rankwatch-runs/latest", "--rank", "0", "--rank", "1"]
    diff = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True).stdout
    (first,) = re.findall(r"^  first .*: ", README, re.MULTILINE)
    assert first in diff


def test_the_commands_of_one_node(folder: Path) -> None:
    assert IN_ORDER[0] == "rankwatch run -- torchrun --nproc-per-node 2 train.py"
    said = {}
    for command in IN_ORDER:
        free = command.replace("9464", "0")  # whatever else uses that port
        done = subprocess.run(
            ["bash", "-c", free], cwd=folder, env=shell_environment(folder), capture_output=True, text=True, check=False
        )
        # The run that is told to stop after a batch fails, and two traces differ.
        expected = 1 if "ABORT_AFTER" in command or command.startswith("diff") else 0
        assert done.returncode == expected, (command, done.stdout, done.stderr)
        said[command] = done.stdout
    (report,) = [text for command, text in said.items() if command.startswith("rankwatch report") and "--json" in command]
    assert json.loads(report)["reason"].startswith("stopped after batch 3")
    assert "finished" in said["rankwatch list"]


def test_the_commands_of_several_nodes(folder: Path) -> None:
    collector = COLLECTOR.replace("27077", "0")
    nodes = [
        ONE_OF_TWO_NODES.replace("--node-rank 0", f"--node-rank {node}").replace(
            "--master-addr head", "--master-addr 127.0.0.1"
        )
        for node in range(2)
    ]
    assert nodes[0] != nodes[1] != ONE_OF_TWO_NODES
    env = shell_environment(folder)
    with subprocess.Popen(
        ["bash", "-c", f"exec {collector}"], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stderr is not None
        assert "collecting on tcp://" in daemon.stderr.readline()
        port = ["--master-port", env["MASTER_PORT"]]
        jobs = [
            subprocess.Popen(["bash", "-c", node.replace("--nproc", f"{' '.join(port)} --nproc")], cwd=folder, env=env)
            for node in nodes
        ]
        assert [job.wait(120) for job in jobs] == [0, 0]
        daemon.send_signal(signal.SIGTERM)
        out, _ = daemon.communicate(timeout=30)
    assert daemon.returncode == 0
    assert out == "rankwatch: run train-0 finished: 4 ranks, 20 batches, no inf or nan\n"
    assert not (folder / "shared" / "rankwatch.json").exists()


def test_the_page(folder: Path) -> None:
    (folder / "rankwatch-runs").mkdir()
    env = {**shell_environment(folder), "RANKWATCH_PORT": "0"}
    with subprocess.Popen(["bash", "-c", f"exec {UI}"], cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        url = page.stdout.readline().split()[-1]
        with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(url) as answer:
            assert b"<title>rankwatch</title>" in answer.read()
        page.send_signal(signal.SIGTERM)
    assert page.returncode == 0


def test_the_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / picture).stat().st_size > 10_000 for picture in pictures)


UNTIL_STOPPED = """\
import os

def goes_on():  # rank 0 looks for the file, so that all ranks end with the same batch
    is_stopped = torch.tensor(float(os.path.exists("stop")))
    dist.broadcast(is_stopped, 0)
    return not is_stopped

"""


def test_tuning_a_training_that_runs(folder: Path) -> None:
    assert len(TUNE) == 4
    train = folder / "train.py"
    script = train.read_text()
    assert script.count("for batch in range(20):") == 1
    train.write_text(UNTIL_STOPPED + script.replace("for batch in range(20):", "while goes_on():"))
    env = shell_environment(folder)
    job_env = {**env, "RANKWATCH_CONNECTION": "shared/rankwatch.json", "RANKWATCH_JOB": "train"}
    with subprocess.Popen(
        ["bash", "-c", f"exec {COLLECTOR.replace('27077', '0')}"], cwd=folder, env=env, stderr=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stderr is not None
        assert "collecting on tcp://" in daemon.stderr.readline()
        job = subprocess.Popen([*TORCHRUN, "-m", "rankwatch.attach", "train.py"], cwd=folder, env=job_env)
        try:
            assert "run train-0: 2 rank(s)" in daemon.stderr.readline()
            told = [subprocess.check_output(["bash", "-c", command], cwd=folder, env=env, text=True) for command in TUNE]
        finally:
            (folder / "stop").touch()
            code = job.wait(120)
            daemon.send_signal(signal.SIGTERM)
        _, log = daemon.communicate(timeout=30)
    assert code == 0
    changes = [
        "every 10",
        "modules encoder.*, head; ignore *.rotary; check async",
        "trace batches 5000, 5001",
        "every 1; modules all; ignore nothing",
    ]
    assert [re.sub(r"^[12] ranks? of ", "", line) for line in told] == [f"train-0 told: {change}\n" for change in changes]
    assert re.findall(r"options changed: (.*)", log) == changes
    assert "4 ranks of train-0 told: every 10" in README


def test_the_notices_shown_are_as_they_are_printed() -> None:
    overflow = Notice(NoticeKind.HEADROOM, "blocks.1.up", "Linear", "output", "float16", 3, 40, 511.0, 0.26)
    underflow = Notice(NoticeKind.UNDERFLOW, "blocks.0", "Block", "grad_output", "float16", 0, 40, 1.25e-6, 0.0)
    assert f"  noticed    rank 1: {describe_notice(overflow)}\n{'':13}ranks 0-1: {describe_notice(underflow)}\n" in README


def test_every_option_of_watch_is_in_the_table() -> None:
    shown = re.findall(r"^\| `(\w+)=", README, re.MULTILINE)
    for option in fields(Config):
        assert option.name in shown
        assert (f"`RANKWATCH_{option.name.upper()}" in README) is (option.name not in FUNCTIONS)


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
def test_the_python_is_python(block: str) -> None:
    # ``continue`` belongs to the training loop round it.
    ast.parse(block.replace("continue", "pass"))


def test_the_float32_recipe_mends_an_overflow() -> None:
    recipe = next(block for block in PYTHON if "class Float32" in block)
    block = nn.Module()
    block.ffn = nn.Linear(64, 64, bias=False)
    nn.init.constant_(block.ffn.weight, 100.0)
    x = torch.full((1, 64), 100.0)
    with torch.autocast("cpu", dtype=torch.float16):
        assert block.ffn(x).isinf().all()
        exec(recipe, {"nn": nn, "torch": torch, "block": block})
        assert block.ffn(x.half()).isfinite().all()


def test_every_tool_the_commands_need_is_here() -> None:
    words = {word for command in COMMANDS for word in re.findall(r"(?:^|&& )(?:\w+=\S+ )*([\w./]+)", command)}
    assert words <= {"python3", ".venv/bin/pip", ".venv/bin/rankwatch", ".venv/bin/python", "rankwatch", "torchrun", "diff"}
    assert shutil.which("diff")
