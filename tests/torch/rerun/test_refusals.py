"""Forwards that are run again in a way of their own (compiled, checkpointed), or are not, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from closeups import late, line_of, place, the_only, tripped
from models import Calls, replicated
from notebook import model_of, unwatch, watched
from rankwatch.errors import OverflowDetected
from rankwatch.rerun.capsule.capsule import CapsuleRules
from rankwatch.shared.types.frame import State
from rankwatch.shared.types.trip import Cause
from rankwatch.shared.words.cause import classify
from trainings.parts import Root

NAN, INF = float("nan"), float("inf")
ONES = torch.ones(2, 4)


# --- compiled modules ---------------------------------------------------------------------------------------------------


def exponential(factor: float = 1e6) -> Any:
    return Root(lambda self, x: torch.exp(self.inner(x).abs() * factor), inner=nn.Linear(4, 4))  # compiled


def whole() -> Any:
    return torch.compile(nn.Sequential(exponential()), backend="aot_eager")


def in_its_place() -> Any:
    model = nn.Sequential(exponential())
    model.compile(backend="aot_eager")
    return model


def one_block() -> Any:
    compiled: Any = torch.compile(exponential(), backend="aot_eager")
    return nn.Sequential(nn.Linear(4, 4), compiled)


@pytest.mark.parametrize("make", [whole, pytest.param(in_its_place, marks=pytest.mark.slow), one_block])
@pytest.mark.parametrize("check", ["frame", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_module_is_run_eagerly(make: Callable[[], Any], check: str) -> None:
    _, found = late(make(), ONES, check=check)
    assert place(found) == ("aten.exp.default", line_of("compiled", __file__))
    assert (found.recurred, found.of, found.is_eager) == (3, 3, True)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_function_around_the_model_hides_what_it_was_given() -> None:
    model = nn.Sequential(exponential())
    _, notes = watched(model)
    step = torch.compile(lambda x: model(x), backend="eager")
    _, found = the_only(notes, step, ONES)
    assert found.note == "not run again: it runs compiled, and what the model was given is not at hand"


def wrong(graph: Any, inputs: Any) -> Any:
    """A compiler with a bug: its exp is inf."""
    for node in graph.graph.nodes:
        if node.target is torch.exp:
            node.target = lambda x: torch.exp(x) / 0
    graph.recompile()
    return graph


@pytest.mark.usefixtures("fresh_compiler")
def test_a_bug_of_the_compiler_is_not_called_one_of_the_hardware() -> None:
    model: Any = torch.compile(nn.Sequential(exponential(0.1)), backend=wrong)
    trip, found = tripped(model, ONES)
    assert (found.recurred, found.of, found.is_eager, trip.recurs) == (0, 3, True, None)
    assert classify(trip)[0] is not Cause.UNEXPLAINED


# --- what is refused, with its reason ----------------------------------------------------------------------------------


def communicates(x: Tensor) -> Tensor:
    """Bad before it communicates: what was about to be sent has an origin."""
    y = x / 0  # sent
    dist.all_reduce(y)
    return y


@pytest.mark.usefixtures("one_rank")
def test_a_forward_that_communicates_is_run_up_to_there(tmp_path: Path) -> None:
    model = nn.Sequential(Calls(communicates))
    _, notes = watched(model)
    notes.rules = CapsuleRules(tmp_path)
    _, found = the_only(notes, model, ONES)
    assert (found.capsule, [*tmp_path.iterdir()]) == ("", [])  # it could not be run elsewhere
    assert place(found) == ("aten.div.Tensor", line_of("sent", __file__))
    assert (found.of, found.note) == (0, "not run again: it communicates by c10d.allreduce_.default")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_a_wrapper_that_communicates_inside_of_the_model_is_not_called() -> None:
    inner = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    _, found = tripped(Root(lambda self, x: self.inner(x) / 0, inner=inner), ONES)
    assert (found.of, found.note) == (0, "not run again: DistributedDataParallel inside of it communicates")
    _, found = tripped(nn.Sequential(Root(lambda self, x: self.inner(x), inner=inner), Calls(lambda x: x / 0)), ONES)
    assert (found.recurred, found.of) == (3, 3)  # the module that tripped communicates with nobody


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_sharded_modules_and_tensors_are_not_run_again() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    given = distribute_tensor(ONES, mesh, [Replicate()])
    assert isinstance(given, DTensor)
    _, found = tripped(Calls(lambda x: x / 0), given)
    assert (found.of, found.note) == (0, "not run again: its tensors are sharded: computing with them communicates")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_of_an_fsdp_model_the_module_inside_of_a_unit_is_run_again() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), Calls(lambda x: x / 0))
    fully_shard(model)
    trip, found = tripped(model, ONES)
    assert (trip.frame.spec.module, found.recurred, found.of) == ("1", 3, 3)
    unit: Any = fully_shard(Root(lambda self, x: self.inner(x) / 0, inner=nn.Linear(4, 4)))
    _, found = tripped(unit, ONES)
    assert (found.of, found.note) == (0, "not run again: it communicates (FSDPModule)")


def test_a_transformation_of_functions_is_not_run_again() -> None:
    model = Calls(lambda x: x / 0)
    _, notes = watched(model)
    with pytest.raises(OverflowDetected):
        torch.func.functional_call(model, {}, (ONES,))
    assert notes.closeups[0].recurred == 3
    unwatch()
    _, notes = watched(model)
    try:
        torch.func.vmap(model)(ONES)
    except OverflowDetected:
        assert "torch.func" in notes.closeups[0].note


def test_a_functional_call_is_run_again_with_its_own_parameters() -> None:
    model = nn.Linear(4, 4)
    _, notes = watched(model)
    with pytest.raises(OverflowDetected):
        torch.func.functional_call(model, {"weight": torch.full((4, 4), 1e38), "bias": torch.zeros(4)}, (ONES * 100,))
    assert (notes.closeups[0].recurred, notes.closeups[0].precision[1].state) == (3, State.FINITE)
    assert notes.closeups[0].precision[1].abs_max > 1e40


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_is_run_again(mode: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Calls(lambda x: (x - 1e3).sqrt())).eval()
    _, notes = watched(model)
    with mode(), pytest.raises(OverflowDetected):
        model(ONES)
    assert (notes.closeups[0].recurred, notes.closeups[0].of) == (3, 3)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_module_is_run_again(use_reentrant: bool) -> None:
    model = Root(lambda self, x: checkpoint(self.inner, x, use_reentrant=use_reentrant), inner=exponential())
    trip, found = tripped(model, ONES.clone().requires_grad_())
    assert (trip.frame.spec.module, found.recurred, found.of) == ("inner", 3, 3)


def test_a_hook_of_the_users_that_makes_it_bad_is_run_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: output / 0)  # hooked
    _, found = tripped(model, ONES)
    assert place(found) == ("aten.div.Tensor", line_of("hooked", __file__))
    assert found.recurred == 3


def test_a_model_that_a_thread_of_its_own_runs() -> None:
    model = nn.Sequential(exponential())
    _, notes = watched(model)
    with ThreadPoolExecutor(1) as thread, pytest.raises(OverflowDetected):
        thread.submit(model, ONES).result()
    assert notes.closeups[0].recurred == 3


def in_threads(self: Root, x: Tensor) -> Tensor:
    """Computes the halves of a batch in threads, on replicas, as ``nn.DataParallel`` does with several GPUs."""
    with ThreadPoolExecutor(2) as threads:
        halves = [threads.submit(replicated(self.module), half) for half in x.chunk(2)]
    return torch.cat([half.result() for half in halves])


def count(self: Root, x: Tensor) -> Tensor:
    self.calls += 1
    return torch.log(self.inner(x) * 0)  # in a replica


def counted() -> Root:
    model = Root(count, inner=nn.Linear(4, 4))
    model.register_buffer("calls", torch.zeros(()))
    return model


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
def test_a_replica_of_data_parallel_is_run_again(check: str) -> None:
    model = model_of(nn.Linear(4, 4), counted())
    _, notes = watched(model, check=check)  # of DataParallel, what it wraps is watched
    around = Root(in_threads, module=model)
    with pytest.raises(OverflowDetected):
        _ = around(ONES), around(ONES)
    trip, (found,) = notes.trips[0], notes.closeups  # the other thread may begin after this trip, and trip too
    assert trip.frame.spec.module == "1"
    assert place(found) == ("aten.log.default", line_of("in a replica", __file__))
    assert (found.recurred, found.of) == (3, 3)
    assert model[1].calls == 0  # of the replicas alone


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
def test_a_forward_that_starts_threads_is_not_run_again(check: str) -> None:
    """What its threads do is not seen. Run again, they make no frames, and no operator of the others is blamed."""
    detector, notes = watched(model := Root(in_threads, module=nn.Sequential(counted())), check=check)
    with pytest.raises(OverflowDetected):
        _ = model(ONES), model(ONES)
    (trip,), (found,) = notes.trips, notes.closeups
    assert (trip.frame.spec.module, trip.operator, found.operator, detector.fault) == ("", None, None, "")
    assert (found.of, found.note) == (0, "not run again: it runs its modules in threads of its own")


@pytest.mark.filterwarnings("ignore")
def test_data_parallel_without_a_gpu() -> None:
    inner = nn.Sequential(exponential())
    model = nn.DataParallel(inner)
    trip, found = tripped(model, ONES)
    assert (trip.frame.spec.module, found.recurred, found.of) == ("0", 3, 3)


def test_a_loss_has_no_forward_to_run_again() -> None:
    model = nn.Linear(4, 4)
    _, notes = watched(model, policy="strict")
    loss = (model(ONES) * 0).log().sum()
    with pytest.raises(OverflowDetected):
        loss.backward()
    assert notes.closeups[0].note.startswith(
        "not run again: the loss is computed outside of the model's forward; backward was"
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
def test_an_operator_on_functions_is_found() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    model = Calls(lambda x: flex.flex_attention(x, x, x))  # flex
    _, found = tripped(model, torch.ones(1, 1, 16, 16) * 1e30)
    assert place(found) == ("flex_attention", line_of("flex", __file__))
    assert found.recurred == 3
