"""A capsule: what is in it, what is not, and that there is none that is not whole."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import makers
from rankwatch.rerun.capsule import capsule
from rankwatch.rerun.capsule.capsule import CapsuleRules, CapsuleWritten, write
from rankwatch.rerun.capsule.files import MANIFEST, SUMS, TENSORS
from rankwatch.rerun.capsule.tensor_file import BrokenTensorsError, read_tensors, write_tensors
from rankwatch.rerun.forward import Forward
from trainings.parts import Root

SECRET = 1234567.0


def written(folder: Path, module: nn.Module, *args: Any, until: float = float("inf"), **rules: Any) -> CapsuleWritten:
    return write(CapsuleRules(folder, **rules), Forward(module, args, {}, "output"), makers.trip(), until=until)


def manifest(at: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((at / MANIFEST).read_text())
    return found


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    at = written(tmp_path, nn.Linear(2, 2), torch.ones(3, 2)).path
    assert at is not None
    for path in (at, *at.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    listed = {line.split("  ")[1] for line in (at / SUMS).read_text().splitlines()}
    assert {MANIFEST, TENSORS} < listed


def test_another_library_reads_its_tensors(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    tensors = {
        "f": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "i": torch.arange(3),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 2),
        "one": torch.tensor(2.5, dtype=torch.float64),
    }
    write_tensors(tmp_path / "file", tensors, float("inf"))
    for found in (load_file(tmp_path / "file"), read_tensors(tmp_path / "file")):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1, -40])
def test_a_tensor_file_that_is_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.randn(16), "b": torch.randn(4)}, float("inf"))
    body = path.read_bytes()
    path.write_bytes(body[:size])
    with pytest.raises(BrokenTensorsError):
        read_tensors(path)


def test_a_tensor_file_whose_rows_overlap_is_refused(tmp_path: Path) -> None:
    """1,000 rows of one megabyte would be a gigabyte."""
    row = {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}
    for rows in ({str(number): row for number in range(1000)}, {"a": row, "b": row | {"data_offsets": [1, (1 << 20) + 1]}}):
        head = json.dumps(rows).encode()
        (tmp_path / "file").write_bytes(len(head).to_bytes(8, "little") + head + bytes((1 << 20) + 1))
        with pytest.raises(BrokenTensorsError, match="overlaps another tensor"):
            read_tensors(tmp_path / "file")


def test_inputs_have_priority_over_parameters(tmp_path: Path) -> None:
    at = written(tmp_path, nn.Linear(512, 512), torch.ones(4, 512), limit=1 << 19).path
    assert at is not None
    assert set(read_tensors(at / TENSORS)) == {"input[0]", "bias", "random.cpu"}
    assert [one.partition(" ")[0] for one in manifest(at)["left_out"]] == ["weight"]


def test_a_tensor_is_stored_once(tmp_path: Path) -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    tied = Root(lambda self, x, y: self.second(self.first(x)) + y, first=first, second=second)
    x = torch.ones(2, 8)
    at = written(tmp_path, tied, x, x.expand(2, 8)).path
    assert at is not None
    assert set(read_tensors(at / TENSORS)) == {"first.weight", "input[0]", "random.cpu"}


def test_a_view_of_much_memory_is_stored_alone(tmp_path: Path) -> None:
    at = written(tmp_path, nn.Identity(), torch.zeros(1 << 20)[::1024], torch.zeros(4, 1).expand(4, 1 << 20)).path
    assert at is not None
    assert sum(path.stat().st_size for path in at.rglob("*.safetensors")) < 50_000


def test_without_inputs_nothing_of_them_is_stored(tmp_path: Path) -> None:
    def remember(self: Root, x: Tensor, texts: list[str]) -> Any:
        self.last = x
        return self.linear(x)

    module, x = Root(remember, linear=nn.Linear(2, 2)), torch.full((4, 2), SECRET)
    x[0, 0] = -1
    module(x, ["my secret"])
    at = written(tmp_path, module, x, ["my secret"], with_inputs=False).path
    assert at is not None
    assert set(read_tensors(at / TENSORS)) == {"linear.weight", "linear.bias", "random.cpu"}
    (form, _) = manifest(at)["args"]["items"]
    assert (form["shape"], form["low"], form["high"]) == ([4, 2], -1.0, SECRET)
    assert manifest(at)["outputs"] == []
    assert b"my secret" not in (at / MANIFEST).read_bytes()


def test_nothing_is_left_of_a_capsule_that_takes_too_long(tmp_path: Path) -> None:
    found = written(tmp_path, nn.Linear(2, 2), torch.ones(2), until=time.monotonic() - 1)
    assert found.path is None
    assert "RANKWATCH_CLOSEUP" in found.why_not
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = written(tmp_path / "file", nn.Linear(2, 2), torch.ones(2))
    assert found.path is None
    assert "not written to" in found.why_not


def test_an_error_in_it_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(capsule, "write_tensors", fail)
    found = written(tmp_path, nn.Linear(2, 2), torch.ones(2))
    assert found == (None, "not written: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    assert not list(tmp_path.iterdir())


def test_a_second_capsule_lies_beside_the_first(tmp_path: Path) -> None:
    paths = [written(tmp_path, nn.Linear(2, 2), torch.ones(2)).path for _ in range(2)]
    assert [path.name for path in paths if path is not None] == ["rank-0", "rank-0.2"]


class Trainer:
    """As large as a trainer that a module knows."""

    def __init__(self) -> None:
        self.rows = [{"text": "private", "number": number} for number in range(50_000)]


def test_a_trainer_that_the_module_knows_is_left_out(tmp_path: Path) -> None:
    knows = Root(lambda self, x: x, before=1, trainer=Trainer(), after="2")
    at = written(tmp_path, knows, torch.ones(2)).path
    assert at is not None
    made = manifest(at)["module"]  # the list of sources grows with what other tests have imported
    assert len(json.dumps(made)) < 10_000
    state = dict(made["state"])
    assert (state["before"], state["after"], state["trainer"]["is"]) == (1, "2", "absent")


def test_writing_changes_nothing(tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), torch.randn(3, 4, requires_grad=True)
    module(x).sum().backward()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    gradient, random = x.grad, torch.get_rng_state()
    written(tmp_path, module, x)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert x.grad is gradient
    assert torch.equal(torch.get_rng_state(), random)
