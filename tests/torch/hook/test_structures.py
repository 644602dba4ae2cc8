"""Frames, batches and steps, for models that are built, called and trained in many ways."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import rankwatch
from models import Calls, Checkpointed, replicated
from notebook import Fragile, Gain, Notebook, first_weight, learn, model_of, ones, sgd, watched, watching
from rankwatch.errors import OverflowDetected
from rankwatch.hook.detector import Detector
from rankwatch.measure.walk import MAX_LEAVES
from rankwatch.shared.types.frame import Frame, Kind, Phase, Position, State
from trainings.parts import Root

Pair = namedtuple("Pair", "left right")

CHECKS = ["frame", "batch", "async"]


@dataclasses.dataclass
class Cache:
    keys: Any
    values: Any = None


class Opaque:
    """A container that only ``torch.utils._pytree`` can open."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Keyed(Opaque):
    """An ``Opaque`` whose parts have names."""


def _with_names(value: Keyed) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.GetAttrKey(f"part{index}"), part) for index, part in enumerate(value.parts)], None


pytree.register_pytree_node(Opaque, lambda value: (list(value.parts), None), lambda parts, _: Opaque(*parts))
pytree.register_pytree_node(
    Keyed,
    lambda value: (list(value.parts), None),
    lambda parts, _: Keyed(*parts),
    flatten_with_keys_fn=_with_names,  # type: ignore[arg-type,unused-ignore]
)


def modules(frames: list[Frame]) -> list[str]:
    return [frame.spec.module for frame in frames]


def batches(notebook: Notebook) -> list[tuple[int, int]]:
    """The reported batches, each with the number of optimizer steps before it."""
    return [(summary.batch, summary.optimizer_step) for _, summary in notebook.batches]


def is_loss(frame: Frame) -> bool:
    return frame.spec.readings[0].kind is Kind.LOSS


def parts(notebook: Notebook) -> list[tuple[int, Phase, list[str]]]:
    """The reported parts: batch, phase and modules of each, without losses."""
    found = []
    for index, (_, summary) in enumerate(notebook.batches):
        frames = [frame for frame in notebook.frames(index) if not is_loss(frame)]
        if not frames:
            continue
        (phase,) = {frame.spec.phase for frame in frames}
        assert {frame.position.batch for frame in frames} == {summary.batch}
        found.append((summary.batch, phase, modules(frames)))
    return found


def judged(model: nn.Module, detector: Detector, *args: Any) -> None:
    """Calls the model, and judges all pending numbers under any check."""
    model(*args)
    detector._settler.poll(wait=True)


# --- readings ------------------------------------------------------------------------------------------------------------


def tensor(value: float) -> Tensor:
    return torch.full((2,), -value)


ONE, TWO, THREE = map(tensor, (1, 2, 3))
NESTED = [
    pytest.param(lambda: ONE, {"": 1}, id="tensor"),
    pytest.param(lambda: [ONE, TWO], {"[0]": 1, "[1]": 2}, id="list"),
    pytest.param(lambda: (ONE, (TWO, [THREE])), {"[0]": 1, "[1][0]": 2, "[1][1][0]": 3}, id="tuple"),
    pytest.param(lambda: Pair(ONE, TWO), {"[0]": 1, "[1]": 2}, id="namedtuple"),
    pytest.param(lambda: {"past": [(ONE, TWO)], 7: THREE}, {"[past][0][0]": 1, "[past][0][1]": 2, "[7]": 3}, id="dict"),
    pytest.param(lambda: Cache([ONE], {"x": TWO}), {".keys[0]": 1, ".values[x]": 2}, id="dataclass"),
    pytest.param(lambda: Opaque(ONE, [TWO]), {"[0]": 1, "[1][0]": 2}, id="pytree"),
    pytest.param(lambda: [Keyed(ONE, Opaque(TWO))], {"[0].part0": 1, "[0].part1[0]": 2}, id="pytree-with-names"),
    pytest.param(lambda: (None, "text", ONE, 5, ()), {"[0]": 0, "[1]": 0, "[2]": 1, "[3]": 0}, id="with-what-is-no-tensor"),
]


@pytest.mark.parametrize(("make", "paths"), NESTED)
def test_inputs_and_outputs_of_any_nesting_are_read_under_their_paths(
    make: Callable[[], Any], paths: dict[str, float]
) -> None:
    inner = Calls(lambda *args, **kwargs: kwargs["past"])
    model = Root(lambda self, value: self.inner(ONE, value, past=value), inner=inner)
    detector, notebook = watched(model)
    model(make())
    assert detector.fault == ""
    read = {(r.kind, r.label): r.abs_max for r in notebook.frames()[0].readings}
    labels = [(Kind.INPUT, "input[1]"), (Kind.KEYWORD, "input[past]"), (Kind.OUTPUT, "output")]
    expected = {(kind, label + path): value for kind, label in labels for path, value in paths.items()}
    assert read == {(Kind.INPUT, "input[0]"): 1, **expected}


def test_the_fields_of_a_model_output_of_transformers_are_read() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    model = Calls(lambda x: outputs.CausalLMOutputWithPast(logits=x, hidden_states=(x * 2, x * 3)))
    _, notebook = watched(model)
    model(ONE)
    read = {r.label: r.abs_max for r in notebook.frames()[0].readings}
    assert read == {"input[0]": 1, "output.logits": 1, "output.hidden_states[0]": 2, "output.hidden_states[1]": 3}


def test_a_structure_that_changes_from_call_to_call_is_read_as_it_is() -> None:
    model = Calls(lambda value: value)
    _, notebook = watched(model)
    for value in ([ONE], [ONE, TWO], {"a": [ONE]}, [ONE]):
        model(value)
    labels = [[r.label for r in notebook.frames(batch)[0].readings if r.kind is Kind.OUTPUT] for batch in range(4)]
    assert labels == [["output[0]"], ["output[0]", "output[1]"], ["output[a][0]"], ["output[0]"]]


def test_a_modules_own_parameters_and_floating_buffers_are_read() -> None:
    model = Root(lambda self, x: self.child(x) * self.gain, child=nn.Linear(2, 2, bias=False))
    model.gain = model.same = nn.Parameter(torch.full((2,), 3.0))
    model.register_parameter("absent", None)
    model.register_buffer("offset", torch.tensor(5.0), persistent=False)
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("unset", None)
    _, notebook = watched(model)
    model(torch.ones(1, 2))
    child, root = notebook.frames()
    own = [(r.label, r.kind, r.abs_max) for r in root.readings if r.kind in (Kind.PARAMETER, Kind.BUFFER)]
    assert own == [("gain", Kind.PARAMETER, 3.0), ("offset", Kind.BUFFER, 5.0)]
    assert [r.label for r in child.readings] == ["weight", "input[0]", "output"]


def cycle_of_lists() -> Any:
    cycle: list[Any] = [ONE]
    cycle += [cycle, cycle]
    return cycle


def cycle_of_mappings() -> Any:
    cycle: dict[str, Any] = {"own": ONE}
    cycle["self"] = {"back": cycle, "again": [cycle]}
    return cycle


def cycle_of_objects() -> Any:
    cycle = Cache(ONE)
    cycle.values = [cycle, Opaque(cycle)]
    return cycle


@pytest.mark.parametrize("make", [cycle_of_lists, cycle_of_mappings, cycle_of_objects, lambda: [ONE] * 5 * MAX_LEAVES])
def test_cycles_and_very_wide_values_are_bounded_and_their_forward_goes_on(make: Callable[[], Any]) -> None:
    detector, notebook = watched(model := Calls(lambda value: value))
    value = make()
    for _ in range(2):
        assert model(value) is value
    assert (detector.fault, len(notebook.batches)) == ("", 2)
    (frame,) = notebook.frames()
    outputs = [r for r in frame.readings if r.kind is Kind.OUTPUT]
    assert len(outputs) <= MAX_LEAVES
    assert {r.abs_max for r in outputs if r.dtype} == {1.0}


def test_a_very_wide_value_is_not_walked_to_its_end() -> None:
    class Wide(list[int]):
        seen = 0

        def __iter__(self) -> Iterator[int]:
            for value in super().__iter__():
                self.seen += 1
                yield value

    detector, _ = watched(model := Calls(lambda value: None))
    wide = Wide(range(100 * MAX_LEAVES))
    model(wide)
    assert detector.fault == ""
    assert wide.seen <= 10 * MAX_LEAVES


def test_structures_that_never_repeat_do_not_pile_up() -> None:
    detector, _ = watched(model := Calls(lambda value: None))
    known = []
    for number in range(3000):
        model({f"sample {number}": 1})
        known.append(len(detector._recorder._specs))
    assert max(known) == max(known[:2000])


# --- modules -------------------------------------------------------------------------------------------------------------


def test_a_module_called_many_times_has_a_frame_for_each_call() -> None:
    model = Root(lambda self, x: self.inner(self.inner(self.inner(x))), inner=Gain(2.0))
    _, notebook = watched(model)
    model(ones())
    frames = notebook.frames()
    assert modules(frames) == ["inner", "inner", "inner", ""]
    assert [(f.position.frame, f.readings[0].abs_max, f.readings[1].abs_max) for f in frames[:3]] == [
        (0, 1.0, 2.0), (1, 2.0, 4.0), (2, 4.0, 8.0),
    ]  # fmt: skip


def test_the_call_of_a_shared_module_that_goes_bad_is_named_by_all_its_names() -> None:
    shared = Gain(1e20)
    model = nn.Sequential()
    for name in ("encoder", "decoder", "head"):
        model.add_module(name, shared)
    _, notebook = watched(model)
    trip = notebook.trip_of(model, ones())
    assert (trip.position.frame, trip.frame.spec.module) == (1, "encoder")
    assert trip.frame.spec.aliases == ("decoder", "head")


@pytest.mark.parametrize("average", [copy.deepcopy, AveragedModel], ids=["deepcopy", "AveragedModel"])
def test_an_average_of_the_weights_is_no_part_of_the_training(average: Callable[[nn.Module], nn.Module]) -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = sgd(model, 0.1)
    model(ones()).sum().backward()
    optimizer.step()
    averaged = average(model)  # in the midst of the training
    for _ in range(2):
        learn(model(ones()).sum(), optimizer)
        with torch.no_grad():
            for ours, theirs in zip(averaged.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        averaged(ones())
    torch.optim.SGD(averaged.parameters(), 0.1).step()
    averaged(ones() * math.nan)
    copy.deepcopy(averaged)(ones() * math.nan)
    assert (batches(notebook), notebook.trips, detector.fault) == ([(0, 0), (1, 1), (2, 2)], [], "")
    model(ones())
    assert batches(notebook)[-1] == (3, 3)


def test_a_nested_root_forward_that_raises_and_is_caught_leaves_the_outer_one_its_batch() -> None:
    def nested(self: Root, x: Tensor, is_inner: bool = False) -> Any:
        x = self.linear(x)
        if is_inner:
            return self.fragile(x)
        try:
            return self(x, is_inner=True)
        except ValueError:
            return self.linear(x)

    model = Root(nested, linear=nn.Linear(4, 4), fragile=Fragile(-1.0))
    detector, notebook = watched(model)
    model(ones())
    model.fragile.gain = 1.0
    model(ones())
    assert not detector.is_inside()
    assert [modules(notebook.frames(index)) for index in range(len(notebook.batches))] == [
        ["linear", "linear", "linear", ""], ["linear", "linear", "fragile", "", ""],
    ]  # fmt: skip
    assert batches(notebook) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("check", CHECKS)
def test_batches_are_still_reported_and_judged_after_forwards_that_raise(check: str) -> None:
    model, detector, notebook = watching(gain := Gain(), fragile := Fragile(), check=check)
    for number in range(4):
        fragile.gain = -1.0 if number % 2 == 0 else 1.0
        if fragile.gain < 0:
            with pytest.raises(ValueError, match="the user's own"):
                model(ones())
        else:
            model(ones())
    gain.gain, fragile.gain = math.nan, 1.0
    assert notebook.trip_of(judged, model, detector, ones()).position == Position(4, 0, 0)
    assert ([batch for batch, _ in batches(notebook)][:2], detector.fault) == ([1, 3], "")


# --- several models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_inner_first", [True, False])
def test_a_watched_model_inside_of_another_counts_its_own_batches(is_inner_first: bool) -> None:
    inner = model_of(nn.Linear(4, 4), gain := Gain())
    outer = model_of(inner, nn.Linear(4, 4))
    seen: dict[str, tuple[Detector, Notebook]] = {}
    for name in ("inner", "outer") if is_inner_first else ("outer", "inner"):
        seen[name] = watched(inner if name == "inner" else outer)
    inner(ones())
    outer(ones())
    outer(ones())
    assert batches(seen["inner"][1]) == [(0, 0), (1, 0), (2, 0)]
    assert batches(seen["outer"][1]) == [(0, 0), (1, 0)]
    assert modules(seen["inner"][1].frames()) == ["0", "1", ""]
    assert modules(seen["outer"][1].frames()) == ["0.0", "0.1", "0", "1", ""]
    gain.gain = math.nan
    with pytest.raises(OverflowDetected):
        outer(ones())
    found = {name: [trip.frame.spec.module for trip in notebook.trips] for name, (_, notebook) in seen.items()}
    assert found == ({"inner": ["1"], "outer": []} if is_inner_first else {"inner": [], "outer": ["0.1"]})
    gain.gain = 1.0
    outer(ones())
    assert (batches(seen["inner"][1])[-1][0], batches(seen["outer"][1])[-1][0]) == (4, 3)
    assert {detector.fault for detector, _ in seen.values()} == {""}


class Gan:
    """A generator and a discriminator in training, each with an optimizer of its own."""

    def __init__(self) -> None:
        self.generator = model_of(nn.Linear(4, 4), Gain())
        self.discriminator = model_of(nn.Linear(4, 4), nn.GELU(), Gain(), nn.Linear(4, 1))
        self._steps = [sgd(self.generator), sgd(self.discriminator)]

    def train(self) -> None:
        """Two steps of the discriminator, one of the generator: 5 batches of the discriminator, 3 of the generator."""
        for _ in range(2):
            fake = self.generator(ones()).detach()
            (self.discriminator(fake) - self.discriminator(ones())).mean().backward()
            self._step(1)
        (-self.discriminator(self.generator(ones()))).mean().backward()
        self._step(0)

    def _step(self, which: int) -> None:
        self._steps[which].step()
        for optimizer in self._steps:
            optimizer.zero_grad()


def test_the_two_models_of_a_gan_count_their_own_batches_and_steps() -> None:
    gan = Gan()
    _, generator = watched(gan.generator)
    _, discriminator = watched(gan.discriminator)
    for _ in range(2):
        gan.train()
    assert [step for _, step in batches(generator)] == [0, 0, 0, 1, 1, 1]
    assert [step for _, step in batches(discriminator)] == [0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert [batch for batch, _ in batches(generator)] == list(range(6))
    assert [batch for batch, _ in batches(discriminator)] == list(range(10))


@pytest.mark.parametrize(
    ("which", "culprit"),
    [
        ("generator", "batch 3 (optimizer step 1), frame 1\n{}1 (Gain), output: nan\n"),
        ("discriminator", "batch 5 (optimizer step 2), frame 2\n{}2 (Gain), output: nan\n"),
    ],
)
def test_the_model_of_a_gan_that_goes_nan_is_named(which: str, culprit: str, capsys: pytest.CaptureFixture[str]) -> None:
    gan = Gan()
    gain = next(module for module in getattr(gan, which) if isinstance(module, Gain))
    with rankwatch.watch(gan.generator), rankwatch.watch(gan.discriminator):
        gan.train()
        gain.gain = math.nan
        with pytest.raises(rankwatch.OverflowDetected):
            gan.train()
    out = capsys.readouterr().out
    assert out.count("culprit") == 1
    assert culprit.format(13 * " ") in out


# --- threads -------------------------------------------------------------------------------------------------------------


def in_a_thread(call: Callable[[], Any]) -> None:
    """Runs ``call`` in a thread to its end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  it is raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


class Midway(Gain):
    """Runs ``then`` once, in the midst of its forward."""

    then: Callable[[], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        then, self.then = self.then, None
        if then is not None:
            then()
        return super().forward(x)


class Opened(dict[str, Any]):
    """Runs ``then`` once, when somebody reads an item, as the watch does with an input."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__(x=ONE)
        self._then: Callable[[], object] | None = then

    def __iter__(self) -> Iterator[str]:
        then, self._then = self._then, None
        if then is not None:
            then()
        return super().__iter__()


@pytest.mark.parametrize("check", CHECKS)
def test_a_training_that_moves_from_thread_to_thread_is_one_training(check: str) -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(), check=check)
    for _ in range(2):
        in_a_thread(lambda: judged(model, detector, ones()))
        judged(model, detector, ones())
    assert [batch for batch, _ in batches(notebook)] == [0, 1, 2, 3]
    with pytest.raises(OverflowDetected):
        in_a_thread(lambda: judged(model, detector, ones() * math.nan))


@pytest.mark.parametrize("check", CHECKS)
def test_the_first_of_two_threads_in_one_model_is_watched_and_nothing_is_mixed(check: str) -> None:
    model, detector, notebook = watching(Gain(2.0), midway := Midway(), Gain(3.0), check=check)
    midway.then = lambda: in_a_thread(lambda: model(ones() * 100))
    judged(model, detector, ones())
    judged(model, detector, ones())
    assert detector.fault == ""
    assert [modules(notebook.frames(batch)) for batch in range(2)] == [["0", "1", "2", ""]] * 2
    assert [r.abs_max for frame in notebook.frames(0) for r in frame.readings if r.label == "output"] == [2, 2, 6, 6]
    with pytest.raises(OverflowDetected):
        judged(model, detector, ones() * math.nan)


@pytest.mark.parametrize("check", CHECKS)
def test_a_forward_that_outlasts_the_watched_one_of_another_thread(check: str) -> None:
    model, detector, notebook = watching(Gain(2.0), midway := Midway(), Gain(3.0), check=check)
    started, ended = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert ended.wait(60)

    def other() -> None:
        midway.then = wait
        model(ones())

    thread = threading.Thread(target=other, daemon=True)

    def start() -> None:
        thread.start()
        assert started.wait(60)

    midway.then = start
    judged(model, detector, ones())
    ended.set()
    thread.join(60)
    judged(model, detector, ones())
    assert detector.fault == ""
    assert [modules(notebook.frames(index)) for index in range(len(notebook.batches))] == [["0", "1", "2", ""]] * 2


@pytest.mark.parametrize("check", CHECKS)
def test_a_forward_that_raises_in_another_thread_leaves_this_one_its_batch(check: str) -> None:
    model, detector, notebook = watching(Gain(), midway := Midway(), Gain(), check=check)

    def fails() -> None:
        with pytest.raises(TypeError):
            model("no tensor")

    midway.then = lambda: in_a_thread(fails)
    judged(model, detector, ones())
    judged(model, detector, ones())
    assert detector.fault == ""
    assert [(batch, modules(notebook.frames(index))) for index, (batch, _) in enumerate(batches(notebook))] == [
        (0, ["0", "1", "2", ""]), (1, ["0", "1", "2", ""]),
    ]  # fmt: skip


@pytest.mark.parametrize("check", [CHECKS[0], *(pytest.param(check, marks=pytest.mark.slow) for check in CHECKS[1:])])
def test_two_threads_that_enter_a_model_at_once_do_not_blind_the_watch(check: str) -> None:
    model, detector, notebook = watching(Calls(lambda value: value["x"]), Gain(), check=check)
    model(Opened(lambda: in_a_thread(lambda: model({"x": TWO}))))
    count = len(notebook.batches)
    for _ in range(2):
        judged(model, detector, {"x": ONE})
    assert (detector.fault, detector.is_inside()) == ("", False)
    assert len(notebook.batches) >= count + 2
    assert modules(notebook.frames()) == ["0", "1", ""]
    with pytest.raises(OverflowDetected):
        judged(model, detector, {"x": ONE * math.nan})


@pytest.mark.parametrize("check", CHECKS)
def test_one_of_several_replicas_in_threads_is_watched(check: str) -> None:
    """DataParallel's replicas are shallow copies, whose modules share the hooks of the watched ones."""
    others: list[Callable[[], Any]] = []

    def meet(x: Tensor) -> Tensor:
        while others:
            in_a_thread(others.pop())
        return x

    model, detector, notebook = watching(Gain(2.0), Calls(meet), Gain(3.0), check=check)
    first, second = replicated(model), replicated(model)
    for _ in range(2):
        others.append(lambda: second(ones() * 100))
        in_a_thread(lambda: judged(first, detector, ones()))
    assert detector.fault == ""
    assert [modules(notebook.frames(batch)) for batch in range(2)] == [["0", "1", "2", ""]] * 2
    assert [frame.readings[-1].abs_max for frame in notebook.frames()] == [2, 2, 6, 6]
    with pytest.raises(OverflowDetected):
        in_a_thread(lambda: judged(second, detector, ones() * math.nan))


# --- activation checkpointing --------------------------------------------------------------------------------------------


def checkpointed(use_reentrant: bool) -> Checkpointed:
    return Checkpointed(use_reentrant, nn.Linear(4, 4), Gain(), nn.Linear(4, 4))


FORWARD = ["first", "block.0", "block.1", "block.2", "block", ""]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "reversed"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_frames_belong_to_the_batch_whose_backward_runs(
    use_reentrant: bool, order: tuple[int, int], check: str
) -> None:
    model = checkpointed(use_reentrant)
    detector, notebook = watched(model, check=check)
    optimizer = sgd(model, 0.1)
    for _ in range(2):
        losses = [model(ones() * (number + 1)).sum() for number in range(2)]
        for which in order:
            losses[which].backward()
        optimizer.step()
    detector._settler.poll(wait=True)
    told = parts(notebook)
    assert detector.fault == ""
    assert [(batch, names) for batch, phase, names in told if phase is Phase.FORWARD] == [(n, FORWARD) for n in range(4)]
    again = [(batch, names) for batch, phase, names in told if phase is not Phase.FORWARD]
    assert [batch for batch, _ in again] == [order[0], order[1], order[0] + 2, order[1] + 2]
    # Without reentrance the recomputation stops once the backward has its tensors.
    assert all(
        names == (["block.0", "block.1", "block.2", "block"] if use_reentrant else ["block.0", "block.1"])
        for _, names in again
    )
    assert {phase for _, phase, _ in told} == {Phase.FORWARD, Phase.RECOMPUTE}
    for index, (_, summary) in enumerate(notebook.batches):
        frames = notebook.frames(index)
        assert summary.optimizer_step == summary.batch // 2
        after_forward = len(FORWARD) + (not is_loss(frames[0]))
        assert frames[0].position.frame == (0 if frames[0].spec.module == "first" else after_forward)
        if frames[0].spec.module == "first" and summary.batch < 2:
            assert frames[0].readings[-2].abs_max == summary.batch + 1


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_one_backward_through_two_forwards_recomputes_each_for_its_own_batch(use_reentrant: bool, check: str) -> None:
    model = checkpointed(use_reentrant)
    detector, notebook = watched(model, check=check)
    (model(ones()).sum() + model(ones()).sum()).backward()
    detector.remove()
    assert sorted(batch for batch, phase, _ in parts(notebook) if phase is Phase.RECOMPUTE) == [0, 1]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_inf_that_arises_in_the_recomputation_is_of_its_own_batch(use_reentrant: bool, bad: int) -> None:
    model = checkpointed(use_reentrant)
    _, notebook = watched(model)
    losses = [model(ones()).sum() for _ in range(2)]
    losses[1 - bad].backward()
    model.block[1].gain = math.inf
    trip = notebook.trip_of(losses[bad].backward)
    assert (trip.position.batch, trip.frame.spec.phase, trip.frame.spec.module) == (bad, Phase.RECOMPUTE, "block.1")
    assert (trip.position.frame, trip.culprit.state) == (len(FORWARD) + 2, State.INF)
    model.block[1].gain = 1.0
    model(ones()).sum().backward()
    assert len(notebook.trips) == 1


def test_a_whole_model_that_is_checkpointed() -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    for _ in range(2):
        out = checkpoint(model, ones(), use_reentrant=False)
        assert isinstance(out, Tensor)
        out.sum().backward()
    detector.remove()
    forward, again = ["0", "1", "2", ""], ["0", "1"]
    assert parts(notebook) == [
        (0, Phase.FORWARD, forward), (0, Phase.RECOMPUTE, again), (1, Phase.FORWARD, forward), (1, Phase.RECOMPUTE, again),
    ]  # fmt: skip


# --- eval, generation and accumulation -----------------------------------------------------------------------------------


def test_micro_batches_eval_forwards_and_steps_are_counted_separately() -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain())
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    evals = []
    for _ in range(2):
        for _ in range(3):
            model(ones()).sum().backward()
        optimizer.step(lambda: 0.0)
        scheduler.step()
        model.eval()
        for _ in range(2):
            model(ones())  # with gradients: only the mode makes this forward an eval
            evals.append(detector.position)
        model.train()
    assert batches(notebook) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert evals == [Position(2, 1, 3), Position(2, 2, 3), Position(5, 1, 3), Position(5, 2, 3)]


def test_an_eval_forward_that_goes_bad_is_named_as_one() -> None:
    model, _, notebook = watching(nn.Linear(4, 4), gain := Gain())
    model(ones())
    model.eval()
    model(ones())
    gain.gain = math.nan
    assert notebook.trip_of(model, ones()).position == Position(0, 2, 1)


def test_a_closure_that_the_optimizer_calls_is_a_batch_and_its_step_is_one() -> None:
    model, _, notebook = watching(nn.Linear(4, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> float:
        optimizer.zero_grad()
        loss: Tensor = model(ones()).square().sum()
        loss.backward()
        return loss.item()

    for _ in range(2):
        optimizer.step(closure)
    assert [step for _, step in batches(notebook)] == [0, 1]


@pytest.mark.parametrize("is_training", [True, False])
def test_generation_between_batches_is_no_batch(is_training: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=8, n_positions=16, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    detector, notebook = watched(model)
    optimizer = sgd(model, 0.1)
    tokens = torch.tensor([[1, 2, 3]])
    for number in range(2):
        for _ in range(2):
            model.train()
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        model.train(is_training)
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
        assert detector.position[:2] == (2 * number + 1, 4)
    assert detector.fault == ""
    assert batches(notebook) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert len({table.id for table, _ in notebook.batches}) == 1
    labels = {r.label for r in notebook.frames()[-2].readings}
    assert {"input[input_ids]", "input[labels]", "output.loss", "output.logits"} <= labels
    assert first_weight(nn.Sequential(model.lm_head)).isfinite().all()


def test_parameters_that_the_first_forward_makes_do_not_blind_the_watch() -> None:
    model, detector, notebook = watching(nn.LazyLinear(4), Gain())
    for _ in range(2):
        model(ones()).sum().backward()
    assert detector.fault == ""
    assert modules(notebook.frames(0)) == ["0", "1", "", ""]  # the last one is the loss
