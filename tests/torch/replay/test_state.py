"""What a training had set before its forward is set in a replay and in ``repro.py``: globals, and attributes of classes."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from capsules import opened, seal, trial_of
from rankwatch.errors import UsageError
from rankwatch.replay.__main__ import main
from rankwatch.replay.opened import open_capsule
from rankwatch.replay.repro import write_repro
from rankwatch.replay.trial import ForwardResult
from rankwatch.rerun.capsule.files import MANIFEST
from rankwatch.shared.types.frame import State

CONF = "GAIN = 1.0\n"
HELPER = """
import torch
from torch import nn
from . import conf
def scaled(x):
    return torch.exp(x * conf.GAIN)
"""
NET = """
import collections, logging, threading, weakref
import torch
from torch import nn
from dataclasses import dataclass
from torch import nn
from . import helper
from .helper import scaled

@dataclass
class Settings:
    gain: float = 1.0

class Options:
    gain = 1.0
    names = ["a"]
    class Inner:
        gain = 1.0

SETTINGS, TABLE = Settings(), {"gain": 1.0}

class Imports(nn.Module):
    def forward(self, x):
        return scaled(x)

class Calls(nn.Module):
    def forward(self, x):
        return helper.scaled(x)

class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.settings, self.table = SETTINGS, TABLE
    def forward(self, x):
        assert self.settings is SETTINGS and self.table is TABLE
        return torch.exp(x * SETTINGS.gain * TABLE["gain"])

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.settings = Shares(), SETTINGS
    def forward(self, x):
        return self.inner(x)

class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.device, self.linear = torch.device("cpu"), nn.Linear(3, 3)
    def forward(self, x):
        assert self.linear(x).dtype is torch.bfloat16
        return torch.exp(x + torch.rand(3, device=self.device))

class Itself(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.forward = nn.Linear(3, 3), self.call
        self.inner.above = weakref.ref(self)
    def call(self, x):
        return torch.log(self.inner.above().inner(x) * 0)

class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock, self.log, self.last = threading.RLock(), logging.getLogger("a"), collections.deque([1.0], 3)
    def forward(self, x):
        with self.lock:
            self.log.info("called")
            return x / (self.last[0] - 1) * torch.complex(x, x)

class Reads(nn.Module):
    gain = 1.0
    def forward(self, x):
        return torch.exp(x * Options.gain * Options.Inner.gain * self.gain)
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of the user's."""
    (tmp_path / "stately").mkdir()
    for name, text in {"__init__": "", "conf": CONF, "helper": HELPER, "net": NET}.items():
        (tmp_path / "stately" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield imported()
    forget()


def imported() -> Any:
    import stately.net  # type: ignore[import-not-found]

    return stately.net


def forget() -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] in ("stately", "renamed")]:
        del sys.modules[name]


def ended_with(script: Path) -> Any:
    """The exit code of a ``repro.py`` that runs here, with copies of the code and not with what was imported before."""
    forget()
    finders, folders = list(sys.meta_path), list(sys.path)
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script))
    finally:
        sys.meta_path[:], sys.path[:] = finders, folders
        for name in [one for one in sys.modules if one.partition(".")[0] == "repro_parts"]:
            del sys.modules[name]
    return ended.value.code


def set_all(net: Any) -> None:
    sys.modules["stately.conf"].GAIN = 1e3  # type: ignore[attr-defined]
    net.SETTINGS.gain, net.TABLE["gain"] = 1e2, 10.0
    net.Options.gain, net.Options.Inner.gain, net.Reads.gain = 10.0, 10.0, 10.0


@pytest.mark.parametrize("name", ["Imports", "Calls", "Shares", "Outer", "Reads", "Itself", "Holds"])
def test_what_the_training_had_set_is_set(name: str, net: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_all(net)
    module, x = getattr(net, name)(), torch.ones(2, 3)
    capsule = opened(tmp_path / "capsule", module, x, output=module(x))
    forget()  # a fresh process has the values of the files
    trial = trial_of(capsule)
    for _ in range(2):
        result = trial.run(torch.device("cpu"))
        assert result.state is State.INF, result
        assert trial.is_as_trained(result)
    script = capsule.path / "repro.py"
    write_repro(script, capsule, {one: text for one, text in trial._code.texts.items() if one.startswith("stately")})
    (tmp_path / "stately").rename(tmp_path / "gone")
    assert (ended_with(script), capsys.readouterr().out.splitlines()[-1]) == (0, "inf or nan: True")


def test_a_class_without_a_place_says_what_to_do(tmp_path: Path) -> None:
    place: dict[str, Any] = {"__name__": "__main__"}
    exec("from torch import nn\nclass Cell(nn.Identity):\n    pass\n", place)
    capsule = opened(tmp_path, place["Cell"](), torch.ones(2))
    with pytest.raises(UsageError, match=r"the class Cell, which has no name in its module. Define it at .* --module"):
        trial_of(capsule).call()


CELLS = [
    "",
    "%matplotlib inline\nimport torch\nfrom torch import nn\n!pip install nothing",
    "%%time\nGAIN = 1.0\nclass Cell(nn.Module):\n    def forward(self, x):\n        return torch.exp(x * GAIN)",
    "this cell is no Python",
    "GAIN = 1e3",
]


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook: Any = types.ModuleType("__main__")
    notebook.In = CELLS
    for cell in (1, 2, 4):
        exec(re.sub(r"(?m)^[%!].*", "", CELLS[cell]), vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    capsule = opened(tmp_path, notebook.Cell(), torch.ones(2))
    monkeypatch.undo()
    with pytest.raises(UsageError, match="defined in a notebook: --stored-code runs the copy of its cells"):
        trial_of(capsule).call()
    finders = list(sys.meta_path)
    try:
        assert trial_of(capsule, stored=True).run(torch.device("cpu")).state is State.INF
    finally:
        sys.meta_path[:] = finders


ASKS = """
import torch.distributed as dist
from torch import nn
class Asks(nn.Module):
    def forward(self, x):
        return x / dist.get_rank()
"""


def test_a_forward_that_asks_for_its_group_says_what_is_wrong(
    net: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(net.__file__).with_name("asks.py").write_text(ASKS)
    from stately.asks import Asks  # type: ignore[import-not-found]

    capsule = opened(tmp_path / "capsule", Asks(), torch.ones(2))
    found: ForwardResult = trial_of(capsule).run(torch.device("cpu"))
    assert "It uses torch.distributed, and a replay is one process without a process group" in found.error
    monkeypatch.setenv("RANKWATCH_MODE", "")  # set by main
    assert main([str(capsule.path), "--repeat", "1"]) == 2  # neither that it recurs nor that it does not
    assert "recurs     not known: the forward raises" in capsys.readouterr().out


def test_a_script_of_a_training_on_a_gpu_takes_a_device(
    net: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU it runs on the CPU: its tensors, its devices, its random numbers and autocast."""
    module, x = net.Placed(), torch.full((2, 3), 300.0)
    with torch.autocast("cpu", torch.bfloat16):
        capsule = opened(tmp_path / "capsule", module, x)
    manifest = json.loads((capsule.path / MANIFEST).read_text().replace('"cpu"', '"cuda:0"'))
    manifest["random"]["cpu"] = manifest["random"].pop("cuda:0")
    manifest["surroundings"]["autocast"] = {"cpu": [False, "bfloat16"], "cuda": [True, "bfloat16"]}
    seal(capsule.path, manifest)
    capsule = open_capsule(capsule.path)
    trial = trial_of(capsule)
    assert trial.run(torch.device("cpu")).state is State.INF
    script = tmp_path / "repro.py"
    write_repro(script, capsule, trial._code.texts)
    (line,) = [line for line in script.read_text().splitlines() if line.startswith("DEVICE = ")]
    assert line == 'DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the training ran on cuda:0'
    script.write_text(script.read_text().replace(line, 'DEVICE = "cpu"'))
    assert (ended_with(script), capsys.readouterr().out.splitlines()[-1]) == (0, "inf or nan: True")


def test_a_package_that_was_renamed(net: Any, tmp_path: Path) -> None:
    """Its modules, and what the training had set in them."""
    set_all(net)
    capsule = opened(tmp_path / "capsule", net.Calls(), torch.ones(2))
    (tmp_path / "stately").rename(tmp_path / "renamed")
    forget()
    importlib.invalidate_caches()
    assert trial_of(capsule, replaced={"stately": "renamed"}).run(torch.device("cpu")).state is State.INF
    with pytest.raises(UsageError, match=r"cannot import stately.net \(.*\): No module named 'stately'. Start replay where"):
        trial_of(capsule).call()
    (tmp_path / "renamed" / "net.py").write_text("import not_installed")
    del sys.modules["renamed.net"]
    with pytest.raises(
        UsageError, match=r"No module named 'not_installed'. Its own code raises this .* install what it needs"
    ):
        trial_of(capsule, replaced={"stately": "renamed"}).call()


@pytest.mark.parametrize("make", [nn.Conv1d, nn.ConvTranspose1d])
def test_a_convolution_in_half_with_a_bias_runs_in_wider_precisions(make: Any, tmp_path: Path) -> None:
    """torch compares the dtypes of its input and its bias before any operator runs."""
    model = make(2, 2, 1).half()
    nn.init.constant_(model.weight, 100.0)
    trial = trial_of(opened(tmp_path, model, torch.full((1, 2, 3), 1e3, dtype=torch.float16)))
    for dtype in (torch.float32, torch.float64):
        found = trial.run(torch.device("cpu"), dtype=dtype)
        assert (found.error, found.state) == ("", State.FINITE)
