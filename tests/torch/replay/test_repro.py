"""``repro.py`` runs by itself: without rankwatch, without the user's files, and without what these import for other purposes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from capsules import opened, trial_of
from rankwatch.replay.opened import OpenedCapsule
from rankwatch.replay.repro import PARTS, write_repro
from rankwatch.shared.types.frame import State

AGENT = Path(__file__).parents[3] / "agent"

NET = """
from torch import nn
import for_plots
from inverse_helper import inverse

class Plot(for_plots.Plot):
    pass

class Net(nn.Module):
    def forward(self, x):
        return inverse(x)
"""
HELPER = """
def inverse(x):
    return 1 / x
"""
TEXTS = {"inverse_net": NET, "inverse_helper": HELPER, "for_plots": "class Plot:\n    pass\n"}
WITHOUT_RANKWATCH = "import runpy, sys; sys.modules['rankwatch'] = None; runpy.run_path(sys.argv[1])"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    for name in TEXTS:
        sys.modules.pop(name, None)


def captured(folder: Path, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> OpenedCapsule:
    """The capsule of a training whose files are gone but for the module's own and the helper's, once they have run here."""
    for name, text in TEXTS.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    net: Any = __import__("inverse_net")
    capsule = opened(folder, net.Net(), x)
    forget()
    return capsule


def ran(script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", WITHOUT_RANKWATCH, str(script)]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


def texts_of(capsule: OpenedCapsule) -> dict[str, str]:
    """The source texts with which a replay ran."""
    trial = trial_of(capsule)
    assert trial.run(torch.device("cpu")).state is State.INF
    return trial._code.texts


def test_it_needs_torch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the module does not use may be missing."""
    capsule = captured(tmp_path, monkeypatch, torch.zeros(4, 2))
    texts = {name: text for name, text in texts_of(capsule).items() if name in ("inverse_net", "inverse_helper")}
    script = capsule.path / "repro.py"
    write_repro(script, capsule, texts, rows=(2, 3, 4))
    for file in tmp_path.glob("*.py"):
        file.unlink()
    done = ran(script)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        ["first bad operator: aten.reciprocal.default", "inf or nan: True"],
    ), done.stderr
    assert "passed over inverse_net.py:3: ModuleNotFoundError: No module named 'for_plots'\n" in done.stderr
    files = script.with_name("repro_files")
    assert {one.name for one in (files / "sources").iterdir()} == {"inverse_net.py", "inverse_helper.py"}
    (files / "sources" / "inverse_helper.py").write_text(HELPER.replace("1 / x", "1 / (x + 1)"))  # a repair
    done = ran(script)
    assert (done.returncode, done.stdout.splitlines()) == (1, ["inf or nan: False"]), done.stderr


def test_code_of_a_capsule_that_a_replay_did_not_import_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a replay, which runs the script once, would run the code of somebody else's capsule unasked."""
    capsule = captured(tmp_path, monkeypatch, torch.zeros(4, 2))
    capsule.sources["secrets"] = "raise SystemExit('run')"
    assert texts_of(capsule).keys() & {"secrets", "inverse_net"} == {"inverse_net"}


def test_a_name_of_a_capsule_is_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capsule = captured(tmp_path, monkeypatch, torch.zeros(4, 2))
    hostile = '"""\nprint("called")\n"""\\'
    capsule.manifest.update({"class": hostile, "name": hostile, "label": hostile, "rank": hostile})
    write_repro(tmp_path / "named.py", capsule, {})
    tree = ast.parse((tmp_path / "named.py").read_text())
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not any("called" in call and call.startswith("print") for call in calls)


def test_its_parts_import_one_another_and_nothing_else_of_ours() -> None:
    for part in PARTS:
        package = part.split("/")[:-1]
        for node in ast.walk(ast.parse((AGENT / "rankwatch" / part).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) + 1 - node.level]
                assert "/".join([*base, *(node.module or "").split(".")]) + ".py" in PARTS, f"{part}: {ast.unparse(node)}"
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                tops = {name.partition(".")[0] for name in names}
                assert tops <= {"torch", *sys.stdlib_module_names}, f"{part}: {ast.unparse(node)}"
