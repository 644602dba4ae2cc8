"""Modes that see every operation of torch: they see the model's operations, and none of rankwatch's."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from notebook import Gain, model_of, ones, sgd, watched, watching
from rankwatch.errors import OverflowDetected
from rankwatch.shared.types.frame import Phase
from trainings.parts import Root


class Log(TorchDispatchMode):
    """Lists the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_operations_of_the_model_alone() -> None:
    seen = []
    for is_watched in (False, True):
        model, x = model_of(), ones()
        _, notebook = watched(model) if is_watched else (None, None)
        with Log() as log:
            model(x)
        seen.append(log.operations)
        assert notebook is None or len(notebook.batches) == 1
    assert seen[0] == seen[1]


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
def test_what_is_made_for_the_host_is_there_whatever_the_default_device_is(check: str) -> None:
    """Mostly it is a GPU. Here it is meta, on which nothing has a value."""
    model = model_of()
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        detector, notebook = watched(model, check=check, gradients=True, fingerprints=1)
        optimizer = sgd(model)
        x = torch.ones(3, 4, device="cpu")
        for batch in range(4):
            model[1].gain = math.nan if batch == 3 else 1.0
            model(x).sum().backward()
            optimizer.step()
    except OverflowDetected:
        trip = notebook.trip
        assert (trip.position.batch, trip.frame.spec.module, detector.fault) == (3, "1", "")
        assert trip.operator is not None
    else:
        pytest.fail(f"nothing was found: {detector.fault}")
    finally:
        torch.set_default_device(before)


def test_a_forward_of_fake_tensors_is_no_batch() -> None:
    model, detector, notebook = watching()
    model(ones())
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(ones())
    model(ones())
    assert [summary.batch for _, summary in notebook.batches] == [0, 1]
    assert detector.fault == ""


@pytest.mark.filterwarnings("ignore:`torch.jit.trace`")
def test_a_forward_that_is_traced_for_a_script_is_no_batch() -> None:
    model, detector, notebook = watching()
    model(ones())
    traced = torch.jit.trace(model, ones())
    assert torch.equal(traced(ones()), model(ones()))
    assert [summary.batch for _, summary in notebook.batches] == [0, 1]
    assert detector.fault == ""


def selective() -> nn.Module:
    """Saves the results of matrix products, and recomputes all others in the backward."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        keep = operation is torch.ops.aten.addmm.default
        policies = checkpoints.CheckpointPolicy
        return policies.MUST_SAVE if keep else policies.PREFER_RECOMPUTE

    contexts = partial(checkpoints.create_selective_checkpoint_contexts, policy)
    inner = model_of(nn.Linear(4, 4), nn.GELU(), Gain(2.0), nn.Linear(4, 4))
    return Root(lambda self, x: checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts), inner=inner)


@pytest.mark.skipif(not hasattr(checkpoints, "CheckpointPolicy"), reason="selective checkpointing came with torch 2.5")
def test_selective_checkpointing_saves_the_same_tensors_as_without_a_watch() -> None:
    gradients = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = model_of(selective(), selective())
        _, notebook = watched(model) if is_watched else (None, None)
        model(ones()).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        if notebook is not None:
            watched_phases = [spec.phase for table, _ in notebook.batches for spec in table.specs]
            assert watched_phases.count(Phase.FORWARD) == 14  # with the loss
    for bare, mine in zip(*gradients, strict=True):
        assert bare is not None
        assert mine is not None
        assert torch.equal(bare, mine)
