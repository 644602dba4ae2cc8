"""``watch`` and ``detect_overflow`` as a user of one process sees them."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwatch
from jobs import environment
from models import Calls
from notebook import learn, sgd
from trainings.parts import Root


def marked(self: Any, x: Tensor) -> Any:
    hidden = self.norm(x) * self.scale
    self.found = rankwatch.detect_overflow(hidden, "after layer_norm")
    return self.head(hidden)


def test_the_local_report(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    nn.init.constant_(model.get_parameter("0.weight"), 1e20)
    with rankwatch.watch(model) as watch:
        assert repr(watch).endswith("no collector>")
        with pytest.raises(rankwatch.OverflowDetected, match=r"batch 0: 0 \(Linear\), output: inf"):
            model(torch.full((1, 4), 1e20))
        assert repr(watch).endswith("no collector, tripped>")
    out = capsys.readouterr().out
    assert "\n\nrankwatch: first inf of this process\n  culprit    rank 0 of 1 (" in out
    assert "  try        scale or clamp what goes into 0; " in out.splitlines()[-1]
    assert "certainty  this rank alone: no collector configured" in out
    assert "Detected inf/nan during batch_number=0\nLast 1 forward frames:\nabs min  abs max  metadata\n" in out


@pytest.mark.parametrize("watch", [rankwatch.watch, rankwatch.DebugUnderflowOverflow])
def test_a_loop_that_catches_every_trip_gets_one_report_and_then_a_line_a_trip(
    watch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    watched = watch(model)
    for batch in range(21):
        nn.init.constant_(model.get_parameter(f"{batch % 2}.bias"), math.inf)
        with pytest.raises(rankwatch.OverflowDetected):
            model(torch.ones(1, 4))
        nn.init.zeros_(model.get_parameter(f"{batch % 2}.bias"))
    watched.close()
    out = capsys.readouterr().out
    assert out.count("Detected inf/nan") == 1
    said = [line for line in out.splitlines() if line.startswith("rankwatch:")]
    again = [line for line in said if line.startswith("rankwatch: tripped again: rank 0 of 1 (") and "inf" in line]
    assert len(again) == 20
    assert said == ["rankwatch: first inf of this process"] * (watch is rankwatch.watch) + again
    assert out.rpartition("tripped again")[0].count("\n\n\n") <= 2


def test_detect_overflow_inside_a_watched_forward(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = Root(marked, norm=nn.LayerNorm(4), head=nn.Linear(4, 1), scale=1.0)
    with rankwatch.watch(model, trace_batch_nums=[0]):
        model(torch.randn(2, 4))
        assert model.found is False
        model.scale = math.inf
        with pytest.raises(rankwatch.OverflowDetected, match="Root\\), after layer_norm: inf"):
            model(torch.randn(2, 4))
    assert model.found is True
    out = capsys.readouterr().out
    trace, _, report = out.partition("after layer_norm has infs\n")
    assert " after layer_norm\n" in trace
    assert "cause      upstream: born between norm (LayerNorm), the last finite frame, and this mark" in report
    assert "head" not in report.rpartition("Starting batch number=1")[2]


def test_detect_overflow_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert not rankwatch.detect_overflow(torch.ones(2), "fine")
    assert rankwatch.detect_overflow(torch.tensor([math.nan, math.inf]), "here")
    assert rankwatch.detect_overflow(torch.tensor(math.inf), "there")
    assert not rankwatch.detect_overflow(torch.tensor([], dtype=torch.float16), "empty")
    assert not rankwatch.detect_overflow(torch.tensor([True]), "bool")
    assert capsys.readouterr().out == "here has nans\nhere has infs\nthere has infs\n"


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: rankwatch.watch("model"), "takes a torch.nn.Module or a pipeline stage, not str"),  # type: ignore[arg-type]
        (lambda: rankwatch.watch(nn.ReLU), r"not the class ReLU: make the model first, ReLU\(\.\.\.\)"),  # type: ignore[arg-type]
        (lambda: rankwatch.watch([nn.ReLU()]), "not list: give one model, or watch each by itself"),  # type: ignore[arg-type]
        (lambda: rankwatch.watch(torch.compile(torch.relu)), "not function: give the model whose forward it calls"),  # type: ignore[arg-type]
        (lambda: rankwatch.watch(None), "not NoneType: give the model itself"),  # type: ignore[arg-type]
        (lambda: rankwatch.watch(nn.ReLU(), modules=3), "modules=3: expected a list of name patterns"),  # type: ignore[arg-type]
        (lambda: rankwatch.watch(nn.ReLU(), connection="tcp://head:1"), "tcp://head:1 is an address: give the connection"),
        (lambda: rankwatch.watch(torch.jit.script(nn.ReLU())), "a scripted module takes no hooks"),
        (lambda: rankwatch.watch(nn.ReLU(), policy="lax"), "policy='lax'"),
        (lambda: rankwatch.watch(nn.ReLU(), connection="/nowhere.json"), "/nowhere.json does not exist"),
        (lambda: rankwatch.watch(nn.ReLU(), connection='{"a": 1}'), "the connection given as text is malformed"),
    ],
)
def test_errors_stop_before_the_first_batch(call: Any, complaint: str) -> None:
    with pytest.raises(rankwatch.UsageError, match=complaint):
        call()


def test_a_closed_watch_is_not_entered() -> None:
    model = nn.Linear(1, 1)
    with rankwatch.watch(model) as again:
        again.close()
        again.close()
    assert not model._forward_hooks
    with pytest.raises(rankwatch.UsageError, match=r"is closed and sees nothing: call rankwatch\.watch"), again:
        pass


@pytest.mark.slow
def test_a_process_group_made_after_the_watch_is_warned_about(tmp_path: Path) -> None:
    script = """
import sys, rankwatch, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, store):
    model = torch.nn.Linear(1, 1)
    watch = rankwatch.watch(model)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for _ in range(2):
        model(torch.ones(1))
    watch.close()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=2)
"""
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "store")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    for rank in (0, 1):
        line = f"rankwatch: this is rank {rank} of 2, and is watched as rank 0 of 1: watch() was called before init_process_group"
        assert done.stderr.count(line) == 1


def test_two_models_side_by_side() -> None:
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 2)
    with rankwatch.watch(generator), rankwatch.watch(discriminator):
        discriminator(generator(torch.ones(2)))
        with torch.no_grad():
            discriminator.weight.fill_(math.inf)
        generator(torch.ones(2))
        with pytest.raises(rankwatch.OverflowDetected):
            discriminator(generator(torch.ones(2)))


def test_at_a_prompt_a_watch_says_that_a_model_of_its_class_is_still_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a notebook, where a cell that is run again makes a new model under the name of the old one."""

    class Anew(nn.Linear):
        pass

    line = "rankwatch: another Anew is still watched: unwatch() a model before a cell makes it anew"
    old, new, other, in_a_script = Anew(1, 1), Anew(1, 1), nn.Linear(1, 1), Anew(1, 1)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with rankwatch.watch(old), rankwatch.watch(other):
        assert line not in caplog.messages
        with rankwatch.watch(new):
            assert caplog.messages.count(line) == 1
        assert rankwatch.unwatch(old)
        with rankwatch.watch(new):
            assert caplog.messages.count(line) == 1
        monkeypatch.delattr(sys, "ps1")
        with rankwatch.watch(new), rankwatch.watch(in_a_script):
            assert caplog.messages.count(line) == 1


def ran(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_process_that_ends_without_close_ends_well() -> None:
    script = (
        "import rankwatch, torch; m = torch.nn.Linear(1, 1); w = rankwatch.watch(m); m(torch.ones(1)); raise SystemExit(4)"
    )
    done = ran(script)
    assert (done.returncode, done.stdout, done.stderr) == (4, "", "")


def test_a_process_that_tripped_ends_with_77() -> None:
    script = "import rankwatch, torch; m = torch.nn.ReLU(); w = rankwatch.watch(m); m(torch.tensor([float('inf')]))"
    done = ran(script)
    assert done.returncode == 77
    assert "OverflowDetected" in done.stderr


@pytest.mark.slow
def test_the_excepthook_of_the_user_is_called() -> None:
    script = (
        "import sys, rankwatch, torch\n"
        "sys.excepthook = lambda kind, error, trace: print('theirs:', error)\n"
        "w = rankwatch.watch(torch.nn.Linear(1, 1))\n"
        "raise KeyError('a bug')\n"
    )
    done = ran(script)
    assert (done.returncode, done.stdout) == (1, "theirs: 'a bug'\n")


def test_the_public_names() -> None:
    for name in rankwatch.__all__:
        assert getattr(rankwatch, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'wach'"):
        rankwatch.wach  # noqa: B018


def test_a_training_that_diverges_alone_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = sgd(model, 1.0)

    def train() -> None:
        for _ in range(50):
            x = torch.randn(16, 8)
            learn((model(x) - x.sum(1, keepdim=True)).square().mean(), optimizer)

    with pytest.raises(rankwatch.OverflowDetected), rankwatch.watch(model):
        train()
    out = capsys.readouterr().out
    assert "cause      divergence: the loss left its range in batch " in out
    assert "learning rate" in out


def divides(x: Tensor) -> Tensor:
    return x / (x - 1)


def test_the_local_report_has_the_close_up(capsys: pytest.CaptureFixture[str]) -> None:
    with rankwatch.watch(Calls(divides), capsule="off") as watch, pytest.raises(rankwatch.OverflowDetected):
        watch.root(torch.ones(1, 4))
    out = capsys.readouterr().out
    assert f"  operator   aten.div at {__file__}:" in out
    assert ", in divides: return x / (x - 1)\n" in out
    assert "  recurs     recurred 3 of 3\n" in out
    assert "  precision  bad in every precision: inf in float32 and float64\n" in out


def test_without_a_close_up_the_local_report_still_has_the_operator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKWATCH_CLOSEUP", "0")
    with rankwatch.watch(Calls(divides)) as watch, pytest.raises(rankwatch.OverflowDetected):
        watch.root(torch.ones(1, 4))
    out = capsys.readouterr().out
    assert f"  operator   aten.div at {__file__}:" in out
    assert "recurs " not in out


@pytest.mark.parametrize("make", [rankwatch.watch, rankwatch.DebugUnderflowOverflow])
def test_a_closed_watch_does_not_keep_the_model(make: Callable[[nn.Module], rankwatch.Watch]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watch = make(model)
    model(torch.ones(1, 2)).sum().backward()
    freed: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(model[0].weight)]
    watch.close()
    del model
    gc.collect()
    assert [one() for one in freed] == [None, None]
    assert (watch.batch, watch.optimizer_step, watch.is_connected) == (0, 0, False)
    assert watch.summaries()["abs_max/0/input[0]"] == 1.0


def test_an_error_of_ours_as_the_drop_in_is_made_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, root: nn.Module) -> None:
        if isinstance(root, nn.Linear):
            raise RuntimeError("ours")

    monkeypatch.setattr(rankwatch.DebugUnderflowOverflow, "_take_over", fail)
    model = nn.Linear(2, 2)
    rankwatch.DebugUnderflowOverflow(model)
    model(torch.full((1, 2), math.nan)).sum().backward()
    with pytest.raises(rankwatch.UsageError):
        rankwatch.DebugUnderflowOverflow("no model")  # type: ignore[arg-type]
    with pytest.raises(rankwatch.UsageError):
        rankwatch.DebugUnderflowOverflow(model, max_frames_to_save=-1)
