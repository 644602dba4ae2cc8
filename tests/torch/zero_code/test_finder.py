"""Which modules of a script the finder watches, and that it leaves torch unchanged."""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

import rankwatch
from jobs import is_ours
from notebook import learn, sgd, take_step
from rankwatch.api.registry import OUTSIDE, open_watches
from rankwatch.errors import OverflowDetected, UsageError
from rankwatch.zero_code.finder import FEW_STEPS, LOOKED_AT, MAX_MODELS, Finder

CALL = nn.Module.__call__


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


@pytest.fixture(autouse=True)
def finder() -> Iterator[Finder]:
    gc.collect()
    for watch in open_watches():  # of other tests
        watch.close()
    init = Optimizer.__init__
    finder = Finder()
    finder.start()
    yield finder
    finder.stop()
    finder.after_steps.remove()
    Optimizer.__init__ = init  # type: ignore[method-assign]
    for watch in open_watches():
        watch.close()


def watched() -> set[nn.Module]:
    return {watch.root for watch in open_watches()}


def test_the_outermost_module_that_trains_is_watched_from_its_first_batch_on() -> None:
    model = Net()
    for batch in range(LOOKED_AT):
        assert nn.Module.__call__ is not CALL
        model(torch.ones(2))
        (watch,) = open_watches()
        assert (watch.root, watch._detector.position.batch) == (model, batch)
    assert nn.Module.__call__ is CALL


def test_modules_that_do_not_train_are_not_watched() -> None:
    model = Net()
    model.eval()(torch.ones(2))
    model.train()
    with torch.no_grad():
        model(torch.ones(2))
    with torch.inference_mode():
        model(torch.ones(2))
    Net().requires_grad_(False)(torch.ones(2))
    nn.Sequential(nn.ReLU(), nn.Dropout())(torch.ones(2))
    assert watched() == set()
    model(torch.ones(2))
    assert watched() == {model}


def test_a_model_that_is_trained_in_eval_mode_is_watched() -> None:
    model = Net().eval()
    optimizer = sgd(model)
    for batch in range(LOOKED_AT):
        learn(model(torch.ones(2)).sum(), optimizer)
        (watch,) = open_watches()
        assert (watch.root, watch.batch) == (model, batch)
    assert nn.Module.__call__ is CALL


class AutoEncoder(nn.Module):
    """A model with a forward that no training calls."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Net(), Net()
        self.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out

    def loss(self, x: Tensor) -> Tensor:
        hidden = self.decoder(self.encode(x))
        return torch.stack([head(hidden) for head in self.heads]).sum()


@pytest.mark.parametrize("is_training", [True, False])
def test_a_model_whose_parts_are_called_is_watched_as_one(is_training: bool) -> None:
    model = AutoEncoder().train(is_training)
    optimizer = sgd(model)
    for batch in range(LOOKED_AT + 1):
        learn(model.loss(torch.ones(2)), optimizer)
        (watch,) = open_watches()
        assert (watch.root, watch.batch) == (model, batch)
    assert nn.Module.__call__ is CALL


def test_a_wrapped_part_of_a_model_belongs_to_the_model() -> None:
    model = AutoEncoder()
    model.encoder = torch.compile(model.encoder, backend="eager")  # type: ignore[assignment]
    model.decoder(torch.ones(2))
    assert watched() == {model}


def test_a_container_of_a_gan_is_watched_as_one() -> None:
    gan = nn.ModuleDict({"generator": Net(), "discriminator": Net()})
    for _ in range(LOOKED_AT + 2):
        gan["discriminator"](gan["generator"](torch.ones(2))).sum().backward()
    assert watched() == {gan}


def test_of_two_models_that_share_a_part_the_one_that_calls_it_is_watched() -> None:
    first, second = AutoEncoder(), AutoEncoder()
    second.encoder = first.encoder
    second.loss(torch.ones(2))
    assert watched() == {second}


def test_a_shared_part_that_the_script_calls_is_watched_by_itself() -> None:
    first, second = AutoEncoder(), AutoEncoder()
    second.encoder = first.encoder
    first.encoder(torch.ones(2))
    assert watched() == {first.encoder}


class Activated(Net):
    """Its activation is an attribute of the class: all its models have the same one."""

    act = nn.PReLU()

    def __init__(self) -> None:
        super().__init__()
        self.shared = Activated.act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.shared(self.first(x)))
        return out


def test_a_shared_part_belongs_to_the_root_that_runs() -> None:
    models = Activated(), Activated()
    optimizers = [sgd(model) for model in models]
    for model in models:
        model(torch.ones(2))
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            learn(model(torch.ones(2)).sum(), optimizer)
    assert sorted(watch.batch for watch in open_watches()) == [5, 5]


def test_a_shared_parameter_does_not_make_a_training_of_a_model_that_rests() -> None:
    rests, trains = Activated(), Activated()
    optimizer = sgd(trains)
    rests(torch.ones(2))
    for _ in range(5):
        learn(trains(torch.ones(2)).sum(), optimizer)
    assert {watch.root: (watch.batch, watch.has_trained) for watch in open_watches() if watch.root is rests} == {
        rests: (0, False)
    }


def test_a_module_that_contains_itself_is_watched() -> None:
    model = Net()
    model.first.parent = model
    model.first(torch.ones(2))
    assert watched() == {model.first}


def test_both_models_of_a_gan_are_watched() -> None:
    generator, discriminator = Net(), Net()
    for _ in range(LOOKED_AT + 2):
        discriminator(generator(torch.ones(2)))
    assert watched() == {generator, discriminator}
    assert nn.Module.__call__ is CALL


def test_a_second_training_of_the_process_is_watched_too() -> None:
    kept = []
    for _ in range(3):
        model = Net()
        optimizer = sgd(model)
        for _ in range(LOOKED_AT + 1):
            learn(model(torch.ones(2)).sum(), optimizer)
        kept.append(model)
        assert watched() == set(kept)
        assert nn.Module.__call__ is CALL
    sgd(model)  # the same model trained on
    for _ in range(LOOKED_AT):
        model(torch.ones(2))
    assert (watched(), nn.Module.__call__) == (set(kept), CALL)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="in Python 3.10 what is raised again has the traceback it had")
def test_the_traceback_of_a_wrong_optimizer_does_not_show_rankwatch() -> None:
    with pytest.raises(ValueError, match="empty parameter list") as raised:
        torch.optim.SGD([], lr=0.1)
    assert not [entry for entry in raised.traceback if is_ours(entry.path)]


def test_parts_of_a_watched_model_are_not_watched_again() -> None:
    model = Net()
    model(torch.ones(2))
    model.first(torch.ones(2))
    assert watched() == {model}


def test_a_model_takes_over_from_the_layers_it_called_as_it_was_made() -> None:
    made = nn.Sequential(*[nn.Linear(2, 2) for _ in range(MAX_MODELS + 1)])
    for layer in made:
        layer(torch.ones(2))
    for batch in range(LOOKED_AT):
        assert nn.Module.__call__ is not CALL
        made(torch.ones(2))
        (watch,) = open_watches()
        assert (watch.root, watch._detector.position.batch) == (made, batch)
    assert nn.Module.__call__ is CALL


@pytest.mark.parametrize("normalised", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal])
def test_a_layer_that_is_called_as_its_model_is_made_is_not_watched(normalised: Any) -> None:
    class Shaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = normalised(nn.Linear(2, 3))
            self.second = nn.Linear(self.first(torch.ones(2)).shape[0], 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    model = Shaped()
    normalised(model.second)
    assert watched() == set()
    learn(model(torch.ones(2)).sum(), sgd(model))
    assert watched() == {model}


def test_a_script_that_calls_each_layer_by_itself_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    layers = [nn.Linear(2, 2) for _ in range(MAX_MODELS + 3)]
    optimizer = torch.optim.SGD([one for layer in layers for one in layer.parameters()], lr=0.1)
    for _ in range(2 * LOOKED_AT):
        for layer in layers:
            layer(torch.ones(2)).sum().backward()
        assert watched() == set(layers[:MAX_MODELS])
        assert nn.Module.__call__ is CALL
        optimizer.step()
    assert caplog.text.count(f"more than {MAX_MODELS} models train in this process") == 1


@pytest.mark.parametrize("is_made_before", [False, True])
def test_of_models_that_are_trained_one_after_another_all_are_watched(is_made_before: bool) -> None:
    made = [(model := Net(), sgd(model)) for _ in range(2 * MAX_MODELS)] if is_made_before else []
    for number in range(2 * MAX_MODELS):
        model, optimizer = made[number] if is_made_before else (model := Net(), sgd(model))
        made.append((model, optimizer))
        for _ in range(LOOKED_AT + 1):
            learn(model(torch.ones(2)).sum(), optimizer)
        assert model in watched()
        assert nn.Module.__call__ is CALL
    assert len(watched()) == MAX_MODELS


def test_a_model_that_is_trained_in_turn_with_many_others_is_watched_for_its_first_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients = [Net() for _ in range(2 * MAX_MODELS)]
    for turn in range(3):
        for model in clients:
            optimizer = sgd(model)
            for _ in range(LOOKED_AT + 1):
                learn(model(torch.ones(2)).sum(), optimizer)
            assert model in watched() or turn
            assert nn.Module.__call__ is CALL
        assert watched() == set(clients[-MAX_MODELS:])
    assert caplog.text.count("further ones are not watched") == 1


def test_a_copy_that_is_trained_for_a_few_steps_is_not_watched() -> None:
    """As a trial of learning rates does, which ends when the loss is inf."""
    model = Net()
    optimizer = sgd(model)
    for _ in range(LOOKED_AT + 1):
        learn(model(torch.ones(2)).sum(), optimizer)
    trial = copy.deepcopy(model)
    steps = sgd(trial)
    trial(torch.full((2,), math.nan))
    for _ in range(FEW_STEPS):
        assert watched() == {model}
        learn(trial(torch.ones(2)).sum() * 0.0, steps)
    with pytest.raises(OverflowDetected):  # by now it is a training of its own
        trial(torch.full((2,), math.nan))
    assert watched() == {model, trial}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e38])
def test_what_was_no_data_before_the_training_is_not_judged(garbage: float) -> None:
    """A tool that counts operations has the model read memory that nobody has written."""
    model = Net().to(torch.bfloat16 if garbage == 1e38 else torch.float32)
    if garbage == 1e38:
        nn.init.constant_(model.second.weight, 1e3)
    model(torch.full((2,), garbage, dtype=model.first.weight.dtype))
    model.first(torch.full((2,), garbage, dtype=model.first.weight.dtype))
    optimizer = sgd(model)
    for _ in range(3):
        learn(model(torch.ones(2, dtype=model.first.weight.dtype)).sum(), optimizer)
    with pytest.raises(OverflowDetected, match="output: nan"):
        model(torch.full((2,), math.nan, dtype=model.first.weight.dtype))


def test_the_first_batch_is_judged_once_there_is_an_optimizer() -> None:
    model = Net()
    optimizer = sgd(model)
    with pytest.raises(OverflowDetected, match="output: nan"):
        model(torch.full((2,), math.nan))
    optimizer.zero_grad()


def test_a_model_without_values_is_not_watched() -> None:
    Net().to("meta")(torch.ones(2, device="meta"))
    assert not watched()


def test_automatic_discovery_is_off_in_a_script_that_calls_watch() -> None:
    mine, other = Net(), Net()
    with rankwatch.watch(mine):
        other(torch.ones(2))
        assert watched() == {mine}
        assert nn.Module.__call__ is CALL


def test_an_explicit_watch_takes_over_from_the_one_that_was_found() -> None:
    model = Net()
    model(torch.ones(2))
    with rankwatch.watch(model, policy="off") as watch:
        assert list(open_watches()) == [watch]
        model(torch.ones(2) * torch.inf)  # policy off: no trip
        with rankwatch.watch(model) as again:
            assert list(open_watches()) == [again]


def test_a_model_that_was_unwatched_is_not_found_again() -> None:
    model = Net()
    model(torch.ones(2))
    assert watched() == {model}
    assert rankwatch.unwatch(model)
    assert not rankwatch.unwatch(model)
    for _ in range(3):
        model(torch.ones(2))
    assert watched() == set()
    with rankwatch.watch(model):
        assert watched() == {model}


@pytest.mark.parametrize(
    ("option", "complaint"), [("EVERY", "expected a whole number"), ("LOG_FORMAT", "expected text or json")]
)
def test_wrong_options_stop_the_first_batch(option: str, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"RANKWATCH_{option}", "never")
    with pytest.raises(UsageError, match=f"RANKWATCH_{option}='never': {complaint}"):
        Net()(torch.ones(2))


def test_an_error_of_ours_is_logged_and_the_script_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rankwatch.zero_code.finder.watch", lambda module: 1 / 0)
    model = Net()
    for _ in range(2):
        assert model(torch.ones(2)).shape == (2,)
    assert "an error of its own while it looked for the model to watch; nothing is watched" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert nn.Module.__call__ is CALL


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_runs_unwatched(caplog: pytest.LogCaptureFixture) -> None:
    torch.jit.script(Net())(torch.ones(2))
    assert watched() == set()
    assert "a scripted module takes no hooks and is not watched" in caplog.text


def test_modules_that_raise_leave_the_look_out_in_place() -> None:
    with pytest.raises(RuntimeError) as raised:
        Net()(torch.ones(3))
    assert nn.Module.__call__ is not CALL
    if sys.version_info < (3, 11):
        return  # what is raised again has the traceback it had
    names = [entry.name for entry in raised.traceback]
    assert names[:2] == ["test_modules_that_raise_leave_the_look_out_in_place", CALL.__name__]


def test_a_scripts_own_wrapper_of_module_calls_stays() -> None:
    calls, around = [], nn.Module.__call__

    def counted(module: nn.Module, *args: Any) -> Any:
        calls.append(type(module).__name__)
        return around(module, *args)

    nn.Module.__call__ = counted  # type: ignore[method-assign]
    try:
        model = Net()
        for _ in range(LOOKED_AT + 1):
            model(torch.ones(2))
        assert nn.Module.__call__ is counted
    finally:
        nn.Module.__call__ = CALL  # type: ignore[method-assign]
    assert calls == ["Net", "Linear", "Linear"] * (LOOKED_AT + 1)
    assert watched() == {model}


class Augmented(Dataset[Tensor]):
    """A data set with items that a module computes in the workers."""

    def __init__(self) -> None:
        self.net = Net()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        made = self.net(torch.ones(2)).detach()
        return made.sum() * 0 + len(watched())  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_data_workers_are_no_ranks(method: str) -> None:
    items = list(DataLoader(Augmented(), num_workers=1, multiprocessing_context=method, batch_size=None))
    assert items == [0, 0]


def test_a_stage_of_a_pipeline_is_watched_as_one(tmp_path: Path) -> None:
    model = Net()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        schedule.step(torch.ones(4, 2), target=torch.ones(4, 2))
    finally:
        dist.destroy_process_group()
    (watch,) = open_watches()
    assert (watch.root, watch._stage, watch._detector.position.batch) == (model, 0, 1)


@pytest.mark.parametrize("how", ["whole", "in_place", "after_an_eval"])
def test_compiled_models_are_found_and_no_graph_breaks(how: str) -> None:
    torch.compiler.reset()
    model = Net()
    call: nn.Module = model
    if how == "in_place":
        model.compile(backend="aot_eager", fullgraph=True)
    else:
        call = torch.compile(model, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    if how == "after_an_eval":
        model.eval()
        with torch.no_grad():
            call(torch.ones(2))
        model.train()
    call(torch.ones(2)).sum().backward()
    assert watched() == {model}
    with pytest.raises(rankwatch.OverflowDetected, match="batch 1: first \\(Linear\\), output"):
        call(torch.ones(2) * torch.inf)


@pytest.mark.slow
def test_a_model_that_only_a_compiled_function_calls_is_found_by_its_optimizer() -> None:
    torch.compiler.reset()
    model = Net()
    optimizer = sgd(model)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        out: Tensor = model(x).sum()
        return out

    for batch in range(2):
        step(torch.ones(2)).backward()
        assert watched() == ({model} if batch else set())
        take_step(optimizer)
    assert "zero_grad" not in vars(optimizer)
    with pytest.raises(rankwatch.OverflowDetected, match="batch 2: first \\(Linear\\), output"):
        step(torch.ones(2) * torch.inf)


def test_an_optimizer_of_no_model_is_left_as_it_is_and_the_look_out_goes_on() -> None:
    tensor = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([tensor], lr=0.1)
    tensor.sum().backward()
    optimizer.step()
    zero_grad = optimizer.zero_grad  # held by the script, for example by its own scheduler
    for _ in range(2):
        tensor.sum().backward()
        zero_grad()
        assert tensor.grad is None
    assert "zero_grad" not in vars(optimizer)
    model = Net()
    model(torch.ones(2))
    assert watched() == {model}


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.out = nn.Linear(2, 2), nn.Linear(2, 2)
        self.requires_grad_(False)

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.narrow(x))
        return out


def seen_outside(finder: Finder) -> list[nn.Module]:
    return list(finder._outside)


def test_what_is_frozen_and_runs_before_the_model_is_looked_at(finder: Finder) -> None:
    """By its parts, if its own forward is never called; in this script it is called ``vae``."""
    model, vae, teacher = Net(), Vae(), Net()
    for batch in range(LOOKED_AT + 2):
        is_bad = batch > LOOKED_AT
        x = vae.encode(torch.full((2,), torch.inf if is_bad else 1.0))
        with torch.no_grad():
            teacher(x)
        bad = OUTSIDE.first_bad()
        assert (bad and bad.frame.spec.module) == ("vae.narrow" if is_bad else None)
        model(torch.ones(2)).sum().backward()
    assert seen_outside(finder) == [vae.narrow, vae.out, teacher]
    assert watched() == {model}
    copied = pickle.loads(pickle.dumps(copy.deepcopy(vae)))
    assert torch.equal(copied.encode(torch.ones(2)), vae.encode(torch.ones(2)))


def test_what_is_trained_later_is_not_looked_at_as_frozen(finder: Finder) -> None:
    """A model that is evaluated before its training, and one whose parameters an optimizer has."""
    early, late = Net(), Net()
    with torch.no_grad():
        early(torch.ones(2))
    assert seen_outside(finder) == [early]
    optimizer = sgd(late)
    with torch.no_grad():
        late(torch.ones(2))
    early(torch.ones(2))
    assert seen_outside(finder) == []
    assert optimizer.param_groups
