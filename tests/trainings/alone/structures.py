"""What a module takes and gives, or how the training calls whom, is unusual."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import Calls
from trainings.case import Training
from trainings.parts import (
    BAD,
    INF,
    NAN,
    Checkpointed,
    Coder,
    Gain,
    Root,
    Scaled,
    Square,
    chain,
    evaluated,
    fed,
    gained,
    headed,
    middle,
    overflowing,
    put,
    spoiled,
    squared,
    trained,
    turned,
)
from trainings.truths import hostile

# --- containers, layouts -----------------------------------------------------------------------------------------------


def giving(
    call: Callable[[Tensor, Any], Any], unwrap: Callable[[Any], Any] = lambda out: out, gain: Any = NAN, start: Any = 1.0
) -> Training:
    """What a part gives is ``unwrap``ped for the head; in one batch some of it is bad."""
    part = Gain(call, start)
    return turned(part, gain, headed(lambda root, x: root.head(unwrap(root.part(x))), part=part))


Two = namedtuple("Two", "good bad")


@dataclass
class Result:
    good: Tensor
    bad: Tensor


class Plain:
    def __init__(self, good: Tensor, bad: Tensor) -> None:
        self.good, self.bad = good, bad


def one_element(x: Tensor, poison: float) -> Tensor:
    out = x.expand(1000, 4, 4).contiguous().repeat(1, 8, 8)
    out[777, 20, 3] += poison
    return out


hostile("part", "invalid").each(
    a_tuple=lambda: giving(lambda x, gain: (x, x.abs() * gain), lambda out: out[0] + out[1]),
    a_part_that_nobody_uses=lambda: giving(lambda x, gain: (x, x.abs() * gain), lambda out: out[0]),
    a_dict_in_a_list=lambda: giving(
        lambda x, gain: [x, {"deep": {"deeper": x.abs() * gain}}], lambda out: out[1]["deep"]["deeper"]
    ),
    a_named_tuple=lambda: giving(lambda x, gain: Two(x, x.abs() * gain), lambda out: out.bad),
    a_dataclass=lambda: giving(lambda x, gain: Result(x, x.abs() * gain), lambda out: out.bad),
    a_transposed_view=lambda: giving(lambda x, gain: (x.abs() * gain).t(), lambda out: out.t()),
    an_expanded_scalar=lambda: gained(
        lambda x, gain: (x.mean() * gain).expand(4, 4),
        NAN,
        lambda part: headed(lambda root, x: root.head(x + root.part(x)), part=part),
    ),
    a_scalar=lambda: gained(
        lambda x, gain: x.mean() * gain, NAN, lambda part: headed(lambda root, x: root.head(x * root.part(x)), part=part)
    ),
    # An in-place ReLU follows: the output is as the module returned it, or as it is later, but it is bad.
    a_view_that_is_changed_in_place=lambda: giving(lambda x, gain: x * gain, torch.relu_),
    one_element_of_a_million=lambda: giving(one_element, lambda out: out[777, :4, :4], start=0.0),
)
hostile("part", "overflow", "inf").each(
    # After the module has returned, its inf is clamped away in the same memory.
    an_inf_that_is_clamped_in_place=lambda: giving(lambda x, gain: x * gain * gain, lambda out: out.clamp_(-1, 1), 1e30),
)
hostile(("part", "head"), ("invalid", "upstream")).each(
    # A plain object is not walked into: the next module shows it, and says only that it came in bad.
    a_plain_object=lambda: giving(lambda x, gain: Plain(x, x.abs() * gain), lambda out: out.bad),
)
hostile(("part", "head"), ("invalid", "upstream", "overflow"), ("nan", "inf")).each(
    a_complex_output=lambda: giving(lambda x, gain: torch.fft.rfft(x) * gain, lambda out: torch.fft.irfft(out, n=4)),
)


def poisoned_later(poison: Callable[[Tensor], object]) -> Training:
    """`first` is innocent: it gave a finite tensor, into which the root's code writes a nan."""

    def forward(root: Root, x: Tensor) -> Any:
        out = root.first(x)
        if root.gain:
            poison(out)
        return root.head(out)

    model = headed(forward, first=nn.Linear(4, 4), gain=0)
    return turned(model, 1, model)


hostile("head", "upstream").each(
    an_output_that_is_poisoned_in_place_later=lambda: poisoned_later(lambda out: put(out, NAN, 1, 1)),
    # Here the tensor's version does not change.
    an_output_that_is_poisoned_through_data=lambda: poisoned_later(lambda out: put(out.data, NAN, 1, 1)),
)


def nested(part: nn.Module, row: Callable[[int, int], Tensor]) -> tuple[Root, Callable[[int], Any]]:
    """A root that is fed sequences of two lengths, and its loss."""
    model = Root(lambda root, x: root.part(x), part=part, first=nn.Linear(4, 4))

    def loss_of(number: int) -> Any:
        rows = [row(number, length) for length in (2, 3)]
        out = model(torch.nested.nested_tensor(rows, layout=torch.jagged))
        return out.values().square().mean() + model.first.weight.sum() * 0

    return model, loss_of


@hostile(("part", "part.deep"), "invalid")
def jagged() -> Training:
    part = Gain(lambda x, gain: x * gain)
    return turned(part, NAN, *nested(part, lambda number, length: torch.randn(length, 4)))


@hostile("part", "data")
def jagged_data() -> Training:
    def row(number: int, length: int) -> Tensor:
        return torch.full((length, 4), NAN if (number, length) == (BAD, 3) else 1.0)

    return trained(*nested(nn.Linear(4, 4), row))


# --- who calls whom ----------------------------------------------------------------------------------------------------


@hostile("decoder.1", "overflow", "inf")
def in_decode() -> Training:
    """The root is never called."""
    model = Coder(Scaled)
    return turned(model.decoder[1], 1e30, model, squared(model.coded))


@hostile("encoder.0", ("data", "upstream"), never="between modules")
def data_of_encode() -> Training:
    model = Coder(Scaled)

    def loss_of(number: int) -> Any:
        x = torch.randn(4, 4)
        x[1, 1] = NAN if number == BAD else 0.0
        return model.coded(x).square().mean()

    return trained(model, loss_of)


@hostile("layers.1", "overflow", "inf")
def a_list_that_is_called_from_outside() -> Training:
    """The training loop itself goes through the root's layers."""
    model = Root(lambda root, x: x, layers=nn.ModuleList([nn.Linear(4, 4), Scaled(), nn.Linear(4, 4)]))

    def loss_of(number: int) -> Any:
        x = torch.randn(4, 4)
        for layer in model.layers:
            x = layer(x)
        return x.square().mean()

    return turned(model.layers[1], 1e30, model, loss_of)


@hostile("1", "overflow", "inf")
def with_an_evaluation_between() -> Training:
    """A validation of three forwards every two batches."""
    part = Scaled()
    model = middle(part)

    def after(number: int) -> None:
        if number % 2:
            model.eval()
            evaluated(model, 3)
            model.train()

    return turned(part, 1e30, model, after=after)


@hostile("1", "overflow", "inf")
def trained_in_eval_mode_with_evaluations() -> Training:
    """A validation without gradients after each batch is no batch."""
    part = Scaled()
    model = middle(part).eval()
    return turned(part, 1e30, model, after=lambda n: evaluated(model, 1))


hostile("1", "overflow", "inf").each(
    trained_in_eval_mode=lambda: fed(middle(Square()).eval(), lambda x: x.mul_(1e30)),
    under_checkpointing=lambda: overflowing(lambda part: Checkpointed(nn.Linear(4, 8), part, nn.Linear(8, 4))),
)


@hostile("adapter", "overflow", "inf")
def a_frozen_root_with_an_adapter() -> Training:
    """The backbone is frozen and in eval mode; the adapter trains."""
    adapter = Root(lambda own, x: own.lin(x) * own.gain * own.gain, lin=nn.Linear(4, 4), gain=1.0)
    model = headed(lambda root, x: root.head(root.adapter(root.backbone(x))), backbone=chain(), adapter=adapter)
    model.requires_grad_(False).eval()
    adapter.requires_grad_(True)
    return turned(adapter, 1e30, model)


@hostile("0", "data")
def a_head_outside_of_the_root() -> Training:
    """The watched backbone is frozen and in eval mode; only a head that is not watched trains on its features."""
    backbone, head = chain().eval(), nn.Linear(4, 2)

    def loss_of(number: int) -> Any:
        x = torch.randn(4, 4)
        x[1, 1] = NAN if number == BAD else 0.0
        return head(backbone(x)).square().mean()

    return trained(backbone, loss_of, optimizer=torch.optim.SGD([*head.parameters(), *backbone.parameters()], lr=0.01))


@hostile("block.1", "overflow", "inf")
def under_reentrant_checkpointing() -> Training:
    """In the first forward there are no gradients; the number is bad already."""
    first, part = nn.Linear(4, 4), Scaled()
    model = headed(
        lambda root, x: root.head(checkpoint(root.block, root.first(x), use_reentrant=True)), first=first, block=middle(part)
    )
    return turned(part, 1e30, model)


@hostile("0", "data")
def after_a_forward_that_raised() -> Training:
    """The loop catches an error of the model in batch 3, and goes on with the next batch: as after too little memory."""
    model = chain()
    training = fed(model, lambda x: put(x, NAN, 1, 1))

    def step(number: int) -> None:
        try:
            if number == 3:
                model(torch.randn(4, 3))
        except RuntimeError:
            return
        training.step(number)

    return Training(model, step)


@hostile("1", "overflow", "inf", batch=(4 * BAD, BAD))
def with_a_closure() -> Training:
    """LBFGS calls the model as often as it likes: four times a step here."""
    scaled = Scaled()
    model = middle(scaled)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4, max_eval=4, tolerance_grad=0, tolerance_change=0)

    def step(number: int) -> None:
        x = torch.randn(4, 4)
        scaled.gain = 1e30 if number == BAD else 1.0

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return Training(model, step)


@hostile("twin", "overflow", "inf")
def a_module_with_two_names() -> Training:
    return overflowing(lambda part: headed(lambda root, x: root.head(root.twin(x)), twin=part, again=part))


@hostile("late", "overflow", "inf")
def a_module_that_is_added_later() -> Training:
    model = headed(lambda root, x: root.head(root.late(x) if hasattr(root, "late") else x))

    def before(number: int) -> None:
        if number == 2:
            model.late = Scaled()
        if number == BAD:
            model.late.gain = 1e30

    return trained(model, before=before)


@hostile("deep.0.0.0.0", "overflow", "inf")
def deep_within_wrappers() -> Training:
    return overflowing(lambda part: headed(lambda root, x: root.head(root.deep(x)), deep=chain(chain(chain(chain(part))))))


@hostile("net.1", "overflow", "inf")
def in_a_module_that_is_held_aside() -> Training:
    """TorchRL's objectives own the parameters of their networks; the networks are attributes that torch does not know of."""

    def model_of(part: nn.Module) -> Root:
        net = middle(part)
        model = Root(lambda root, x: root.net(x), weights=nn.ParameterList(net.parameters()))
        vars(model)["net"] = net
        return model

    return overflowing(model_of)


@hostile("1", "invalid")
def in_another_thread() -> Training:
    """The forward runs in a thread of the user's, as in torch.nn.DataParallel or a prefetcher."""
    part = Gain(lambda x, gain: x * gain)
    model = middle(part)

    def loss_of(number: int) -> Any:
        results: list[Tensor | BaseException] = []

        def run() -> None:
            try:
                results.append(model(torch.randn(4, 4)))
            except BaseException as error:  # noqa: BLE001  it belongs to the other thread
                results.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0].square().mean()

    return turned(part, NAN, model, loss_of)


# --- compiled ----------------------------------------------------------------------------------------------------------


def layered(*layers: nn.Module) -> tuple[Root, Any]:
    """A model that calls its layers one after another, and the same compiled."""

    def forward(root: Root, x: Tensor) -> Tensor:
        for layer in root.layers:
            x = layer(x)
        return x

    model = Root(forward, layers=nn.ModuleList(layers))
    return model, torch.compile(model, backend="aot_eager")


@hostile("layers.1", "overflow", "inf")
def in_a_compiled_model() -> Training:
    gain = torch.ones(())
    model, compiled = layered(nn.Linear(4, 4), Calls(lambda x: x * gain * gain), nn.Linear(4, 4))
    return spoiled(model, lambda: gain.fill_(1e30), squared(compiled))


@hostile("layers.0", "data", ("inf", "nan"))
def data_of_a_compiled_model() -> Training:
    model, compiled = layered(nn.Linear(4, 4), nn.Linear(4, 4))
    return trained(model, lambda n: compiled(torch.full((4, 4), INF if n == BAD else 1.0)).square().mean())


@hostile("layers.0", "weight")
def a_weight_of_a_compiled_model() -> Training:
    model, compiled = layered(nn.Linear(4, 4), nn.Linear(4, 4))
    return spoiled(model, lambda: put(model.layers[0].weight, NAN, 1, 1), squared(compiled))
