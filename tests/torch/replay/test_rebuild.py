"""What comes out of a capsule computes the same bits as what went in."""

from __future__ import annotations

import collections
import enum
import functools
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsules import opened, seal, trial_of
from models import Calls
from rankwatch.errors import UsageError
from rankwatch.replay.call import Call, of_rows
from rankwatch.replay.opened import open_capsule
from rankwatch.replay.summary import ReplayFindings, render
from rankwatch.replay.trial import enough
from rankwatch.rerun.capsule.files import MANIFEST, SUMS, TENSORS
from trainings.parts import Root

SCALE = 3.0


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and one.dtype == other.dtype
    if isinstance(one, (tuple, list)):
        return all(map(same, one, other))
    return bool(one == other)


class Color(enum.Enum):
    RED = 2.0


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Nested:
    x: Tensor
    more: dict[str, Tensor] = field(default_factory=dict)


class Options:
    def __init__(self, gain: float) -> None:
        self.gain, self.act, self.color = gain, F.gelu, Color.RED
        self.itself = self


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Reads(nn.Module):
    """Reads all kinds of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.options = Options(2.0)
        self.slotted = Slotted(0.5)
        self.partial = functools.partial(torch.clamp, min=-1.0)
        self.table = torch.arange(4.0)
        self.limit = math.inf
        self.operator = torch.ops.aten.mul.Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.partial(self.options.itself.act(x) * self.options.color.value, max=self.limit)
        return scaled(self.operator(x, self.table) * self.slotted.value * self.options.gain)


def hooked() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda module, args, output: output * SCALE)
    module.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    return nn.Sequential(module)


def local() -> nn.Module:
    gain = 4.0

    class Base(nn.Module):
        def scale(self, x: Tensor) -> Tensor:
            return x * gain

    class Inner(Base):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return super().scale(self.linear(x))

    return Inner()


def closure() -> nn.Module:
    gain, shift = torch.tensor(2.0), 1

    def call(x: Tensor) -> Tensor:
        return (lambda y: y * gain + shift)(x)

    return Calls(call)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "eval": lambda: nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4)).eval(),
    "dropout": lambda: nn.Dropout(),
    "lstm": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True),
    "attributes": Reads,
    "hooks": hooked,
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old weight norm": lambda: torch.nn.utils.weight_norm(nn.Linear(4, 4)),
    "module dict": lambda: nn.Sequential(nn.ModuleDict({"a": nn.Linear(4, 4)})["a"], nn.GELU()),
    "a local class": local,
    "a closure": closure,
    "half": lambda: nn.Linear(4, 4).bfloat16().float(),
    "a method": lambda: Calls(nn.Linear(4, 4).forward),
    "a built-in": lambda: Calls(torch.exp),
    "a tensor's method": lambda: Calls(Tensor.sqrt),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_the_forward_of_what_comes_out(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(6, 4)
    capsule = opened(tmp_path, module, x)
    trial = trial_of(capsule)
    random = torch.get_rng_state()
    expected = module(x.clone())
    torch.manual_seed(1)
    call = trial.call()
    assert call.module is not module
    with trial.surrounded(torch.device("cpu")):
        assert same(call.module(*call.args, **call.kwargs), expected)
    assert not torch.equal(torch.get_rng_state(), random)


INPUTS: dict[str, Callable[[], Any]] = {
    "transposed": lambda: torch.randn(4, 6).t(),
    "expanded": lambda: torch.randn(1, 4).expand(6, 4),
    "every other": lambda: torch.randn(12, 4)[::2],
    "scalar": lambda: torch.tensor(2.0),
    "empty": lambda: torch.empty(0, 4),
    "complex": lambda: torch.randn(3, dtype=torch.complex128),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "float8": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "nan and inf": lambda: torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
    "named tuple": lambda: Pair(torch.ones(2), torch.zeros(2)),
    "dataclass": lambda: Nested(torch.ones(2), {"a": torch.zeros(3)}),
    "ordered": lambda: collections.OrderedDict(a=torch.ones(2), b=[1, 2.5, None, "text", math.nan]),
    "default": lambda: collections.defaultdict(list, a=[torch.ones(1)]),
    "plain values": lambda: (True, 3, 2j, b"bytes", slice(1, 2), range(3), ...),
    "values of torch": lambda: (torch.float16, torch.device("cpu"), torch.Size([1])),
    "array": lambda: torch.arange(3.0).numpy(),
    "returned": lambda: torch.max(torch.randn(3, 3), dim=1),
}


@pytest.mark.parametrize("name", INPUTS)
def test_what_comes_out_of_an_input(name: str, tmp_path: Path) -> None:
    given = INPUTS[name]()
    (found,) = trial_of(opened(tmp_path, nn.Identity(), given)).call().args
    if isinstance(given, Tensor):
        assert (found.dtype, found.shape, found.stride()) == (given.dtype, given.shape, given.stride())
        assert same(
            found.float() if found.dtype.itemsize == 1 else found, given.float() if found.dtype.itemsize == 1 else given
        )
    assert type(found) is type(given)
    assert repr(found) == repr(given)


def test_the_strides_decide_and_autocast_too(tmp_path: Path) -> None:
    inner = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = Root(lambda self, x, *, mask: self.inner(x, src_mask=mask), inner=inner).eval()
    x = torch.randn(3, 5, 8).transpose(0, 1).contiguous().transpose(0, 1)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        capsule = opened(tmp_path, module, x, mask=torch.zeros(5, 5))
        expected = module(x, mask=torch.zeros(5, 5))
    trial = trial_of(capsule)
    call = trial.call()
    with trial.surrounded(torch.device("cpu")):
        assert same(call.module(*call.args, **call.kwargs), expected)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_a_global_has_the_value_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Reads.forward.__globals__
    monkeypatch.setitem(place, "SCALE", 7.0)
    module, x = Reads(), torch.ones(4)
    capsule, expected = opened(tmp_path, module, x), module(x)
    monkeypatch.setitem(place, "SCALE", 3.0)
    call = trial_of(capsule).call()
    assert same(call.module(*call.args), expected)


def test_what_is_not_in_it_says_so_when_it_is_used(tmp_path: Path) -> None:
    module = Calls(torch.exp)
    module.texts = iter(["a"])  # type: ignore[assignment]
    call = trial_of(opened(tmp_path, module, torch.ones(1))).call()
    assert call.module(*call.args).item() == pytest.approx(math.e)
    with pytest.raises(UsageError, match=r"\.texts is not in the capsule: a list_iterator"):
        next(iter(call.module.texts))  # type: ignore[arg-type]


def test_inputs_that_are_not_in_it_are_drawn_in_their_range(tmp_path: Path) -> None:
    x, mask, ids = torch.randn(5, 4) * 100, torch.rand(5, 4) > 0.5, torch.randint(0, 9, (5,))
    capsule = opened(tmp_path, nn.Identity(), x, mask, ids, with_inputs=False)
    trial = trial_of(capsule)
    found = trial.call().args
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in (x, mask, ids)]
    assert found[0].max() == x.max()
    assert found[0].min() == x.min()
    assert int(found[2].max()) <= int(ids.max())
    assert len(trial.drawn) == 3


# --- a file that is not as it was written ------------------------------------------------------------------------------


def kept(folder: Path) -> Path:
    return opened(folder, nn.Linear(2, 2), torch.ones(3, 2)).path


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
def test_a_file_that_was_changed_or_cut_short(name: str, tmp_path: Path) -> None:
    path = kept(tmp_path)
    body = (path / name).read_bytes()
    for changed in (body[:-9], body[: len(body) // 2] + b"x" + body[len(body) // 2 + 1 :], b""):
        (path / name).write_bytes(changed)
        with pytest.raises(UsageError, match=f"{name} .* is not as it was written: its checksum differs"):
            open_capsule(path)
    (path / name).unlink()
    with pytest.raises(UsageError, match=f"{name}: No such file"):
        open_capsule(path)


def test_checksums_that_are_cut_short(tmp_path: Path) -> None:
    path = kept(tmp_path)
    (path / SUMS).write_text((path / SUMS).read_text()[:80])
    with pytest.raises(UsageError, match=r"cut short: the capsule was not copied whole"):
        open_capsule(path)


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest, and its checksum as well."""
    described = json.loads((path / MANIFEST).read_text())
    change(described)
    seal(path, described)


def test_what_a_changed_capsule_names_is_not_called(tmp_path: Path) -> None:
    """A class is made without its constructor, and must be a module's; a function is called by the forward alone."""
    path, marker = kept(tmp_path), tmp_path / "called"
    evil = {"is": "object", "class": {"name": "subprocess:Popen"}, "state": [["args", f"touch {marker}"]], "id": 90}

    def change(described: dict[str, Any]) -> None:
        described["args"]["items"].append(evil)

    forge(path, change)
    trial_of(open_capsule(path)).call()
    forge(path, lambda described: described["module"].update({"class": {"name": "os:system"}}))
    with pytest.raises(UsageError, match=r"is no torch\.nn\.Module"):
        trial_of(open_capsule(path)).call()
    assert not marker.exists()


def test_the_names_in_a_capsule_of_somebody_else_are_made_printable(tmp_path: Path) -> None:
    path, hostile = kept(tmp_path), "\x1b[2J\nrankwatch: error: forged\u202e"

    def change(described: dict[str, Any]) -> None:
        described.update({"name": hostile, "class": hostile, "left_out": [hostile]})
        described["versions"]["torch"] = hostile
        described["trip"].update(dict.fromkeys(("module", "class", "label"), hostile))

    forge(path, change)
    capsule = open_capsule(path)
    shown = render(ReplayFindings(path, capsule.manifest, "cpu")) + "".join(capsule.manifest["left_out"])
    assert all(letter.isprintable() or letter == "\n" for letter in shown + capsule.manifest["versions"]["torch"])
    assert not any(line.startswith("rankwatch: error") for line in shown.splitlines())


def test_the_copy_of_the_code_is_run_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone_model.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import sys

    gone = __import__("gone_model")
    capsule = opened(tmp_path, gone.Net(), torch.ones(2))
    (tmp_path / "gone_model.py").unlink()
    monkeypatch.delitem(sys.modules, "gone_model")
    with pytest.raises(UsageError, match=r"cannot import gone_model.*--module gone_model=NAME.*--stored-code"):
        trial_of(capsule).call()
    finders = list(sys.meta_path)
    try:
        trial = trial_of(capsule, stored=True)
        call = trial.call()
        assert call.module(*call.args).tolist() == [2.0, 2.0]
    finally:
        sys.meta_path[:] = finders
        sys.modules.pop("gone_model", None)


# --- rows ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "found"), [({5}, (5, 6)), ({0}, (0, 1)), ({31}, (31, 32)), ({3, 20}, (3, 4)), ({14, 15, 16, 17}, (14, 15))]
)
def test_one_row_is_enough(bad: set[int], found: tuple[int, int]) -> None:
    assert enough(32, lambda begin, end: any(begin <= row < end for row in bad)) == found


def test_two_rows_that_are_bad_together() -> None:
    assert enough(32, lambda begin, end: begin <= 12 < end and begin <= 13 < end) == (12, 14)
    assert enough(32, lambda begin, end: begin <= 3 < end and begin <= 20 < end) == (0, 32)


def test_inputs_without_the_rows_stay_whole() -> None:
    given = Nested(torch.arange(12.0).view(6, 2), {"weights": torch.ones(3), "ids": torch.arange(6)})
    call = of_rows(2, 4, 6)(Call(nn.Identity(), (given, (torch.ones(6, 1), "text")), {"k": torch.ones(6)}))
    (nested, (ones, text)), kwargs = call.args, call.kwargs
    assert nested.x.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert nested.more["weights"].shape == (3,)
    assert nested.more["ids"].tolist() == [2, 3]
    assert (ones.shape, text, kwargs["k"].shape) == ((2, 1), "text", (2,))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    os.environ.pop("RANKWATCH_MODE", None)
