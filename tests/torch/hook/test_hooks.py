"""Between the batches that are measured in full, hooks rest in the forward: torch calls modules without hooks faster."""

from __future__ import annotations

import gc
import math
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import Calls
from notebook import Gain, Notebook, model_of, ones, watched, watching
from rankwatch.errors import OverflowDetected, TrainingAborted
from rankwatch.hook.detector import Detector
from rankwatch.hook.hooks import RARELY, Hooks
from rankwatch.rerun.careful import running_again


def looks(look: Callable[[], object]) -> nn.Module:
    """Calls a function in its forward."""
    return Calls(lambda x: (look(), x)[1])


def acting() -> tuple[Any, list[Callable[[], object]]]:
    """A model, and what its next forward does between its modules."""
    acts: list[Callable[[], object]] = []
    return model_of(nn.Linear(4, 4), looks(lambda: acts and acts.pop()()), Gain()), acts


def hooked(model: nn.Module) -> list[bool]:
    """Whether each module below the root has a hook."""
    return [bool(module._forward_hooks) for module in model.children()]


def looking(**options: Any) -> tuple[Any, Detector, Notebook, list[list[bool]]]:
    """A model that notes, in each forward, which of its modules have a hook."""
    seen: list[list[bool]] = []
    model = model_of(nn.Linear(4, 4), looks(lambda: seen.append(hooked(model))), Gain())
    return (model, *watched(model, **options), seen)


def test_hooks_are_on_in_full_batches_evals_and_between_forwards_and_rest_in_the_other_batches() -> None:
    model, _, _, seen = looking(every=3, trace_batch_nums=[4])
    for _ in range(6):
        model(ones())
        assert hooked(model) == [True] * 3
    model.eval()
    with torch.no_grad():
        model(ones())
    assert [all(one) for one in seen] == [True, False, False, True, True, False, True]
    assert not any(any(one) for one in seen if not all(one))


def test_with_every_1_they_never_rest() -> None:
    model, _, _, seen = looking()
    for _ in range(3):
        model(ones())
    assert all(map(all, seen))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.first, self.encoder = nn.Linear(4, 8), nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.first(x), src_key_padding_mask=mask)
        return out


class Names(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operators_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> list[str]:
    seen = Names()
    with seen:
        model(*given)
    return seen.names


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("every", [1, 10])
def test_a_layer_that_torch_runs_as_one_operator_without_a_watch_is_one_under_a_watch(every: int, is_frozen: bool) -> None:
    torch.manual_seed(0)
    model = Encoder()
    model.encoder.requires_grad_(not is_frozen).eval()
    given = torch.randn(3, 5, 4), torch.arange(5).expand(3, 5) >= torch.tensor([[3], [4], [5]])
    with torch.set_grad_enabled(is_frozen):
        model.first.requires_grad_(not is_frozen)
        bare = operators_of(model, given)
        assert any("_transformer_encoder_layer_fwd" in name for name in bare)
        _, notebook = watched(model, every=every)
        for _ in range(2):
            model(*given)
            assert operators_of(model, given) == bare
            assert all(hooked(model.encoder.layers[0]))
        with torch.no_grad():
            model.encoder.layers[0].linear1.weight.fill_(math.nan)
        with pytest.raises(OverflowDetected):
            model(*given)
    assert not notebook.faults


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_they_are_back_after_a_forward_that_was_ended(error: type[BaseException]) -> None:
    def fail() -> None:
        if fails:
            raise error

    fails: list[int] = []
    model, _, notebook = watching(nn.Linear(4, 4), looks(fail), Gain(), every=10)
    model(ones())
    fails.append(1)
    with pytest.raises(error):
        model(ones())
    fails.clear()
    model[2].gain = math.inf
    assert notebook.trip_of(model.eval(), ones()).frame.spec.module == "2"
    assert hooked(model) == [True] * 3


def test_one_beside_a_hook_of_the_user_stays_where_it_is() -> None:
    model, _, notebook, seen = looking(every=10)
    order: list[str] = []
    model[0].register_forward_hook(lambda *call: order.append("user"))
    before = list(model[0]._forward_hooks)
    for _ in range(2):
        model(ones())
    assert seen[1] == [True, False, False]
    assert list(model[0]._forward_hooks) == before
    assert order == ["user", "user"]
    assert not notebook.faults


def test_one_that_the_user_adds_in_a_forward_comes_after_ours() -> None:
    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * math.nan

    model, acts = acting()
    _, notebook = watched(model, every=10)
    model(ones())
    acts.append(lambda: model[2].register_forward_hook(spoil))
    with pytest.raises(OverflowDetected):
        model(ones())
    assert hooked(model) == [True] * 3
    ours, users = model[2]._forward_hooks.values()
    assert (type(ours).__module__, users) == ("rankwatch.hook.hooks", spoil)
    assert notebook.trips[0].frame.spec.module == ""  # ours on the module saw what was finite


def test_a_module_that_is_replaced_in_a_forward_keeps_no_hook() -> None:
    model, acts = acting()
    replaced = model[2]
    detector, _ = watched(model, every=10)
    model(ones())
    acts.append(lambda: model.__setitem__(2, Gain()))
    model(ones())
    assert not replaced._forward_hooks
    assert hooked(model) == [True] * 3
    detector.remove()
    assert not any(hooked(model))


def test_removing_and_choosing_in_a_forward_leave_none_behind() -> None:
    model, acts = acting()
    detector, _ = watched(model, every=10)
    model(ones())
    acts.append(detector.remove)
    model(ones())
    assert not any(hooked(model))


def test_an_abort_that_comes_in_a_forward_is_raised_at_the_next_module() -> None:
    def hear() -> None:
        thread = threading.Thread(target=detector.obey, args=(lambda: TrainingAborted("rank 5 of 8"),))
        thread.start()
        thread.join()

    acts: list[Callable[[], object]] = []
    ran: list[int] = []
    model, detector, _ = watching(
        looks(lambda: acts and acts.pop()()), looks(lambda: ran.append(1)), looks(lambda: ran.append(2)), every=10
    )
    model(ones())
    acts.append(hear)
    with pytest.raises(TrainingAborted, match="rank 5 of 8"):
        model(ones())
    assert ran == [1, 2, 1]  # torch had called the first one without a hook


@pytest.mark.parametrize("name", ["rest", "wake"])
@pytest.mark.parametrize("line", range(1, 12))
def test_an_interruption_at_any_line_leaves_no_hook_off(name: str, line: int) -> None:
    model, _, notebook = watching(every=10)
    model(ones())
    lines = [0]

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is getattr(Hooks, name).__code__:
            lines[0] += event == "line"
            if lines[0] == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        model(ones())
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    model(ones())
    with torch.no_grad():
        model.eval()(ones())
    assert hooked(model) == [True] * 3
    assert not notebook.faults


def test_an_interruption_as_the_watch_is_closed_leaves_no_hook_behind() -> None:
    def stop() -> None:
        if running_again() is not None:
            raise KeyboardInterrupt

    model, detector, _ = watching(nn.Linear(4, 4), looks(stop), Gain(), every=10, check="async")
    model(ones())
    model[2].gain = math.inf
    model(ones())
    with pytest.raises(KeyboardInterrupt):
        detector.remove()
    assert not any(hooked(model))
    assert not model._forward_hooks


def test_a_module_that_was_deleted_is_let_go_between_full_batches() -> None:
    model, *_ = watching(nn.Linear(4, 4), Gain(), nn.Linear(4, 4), every=10**6)
    model(ones())
    deleted, weight = model[2], weakref.ref(model[2].weight)
    del model[2]
    for _ in range(RARELY):
        model(ones())
    assert not deleted._forward_hooks
    del deleted
    gc.collect()
    assert weight() is None


def test_torchs_attention_keeps_its_hook_so_that_it_computes_alike_in_all_batches() -> None:
    seen: list[bool] = []
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Sequential(layer, looks(lambda: seen.append(bool(layer.self_attn._forward_hooks))))
    watched(model, every=10)
    _ = model(torch.ones(2, 3, 4)), model(torch.ones(2, 3, 4))
    assert seen == [True, True]
