"""What a module takes and gives is unusual: containers, layouts, dtypes."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models import Calls
from trainings import Root, Scaled, Training, chain, trained

from .case import BAD, INF, NAN, hostile, spoiled


def returning(wrap: Any, unwrap: Any) -> Training:
    """A module that returns its result in a container, of which one part turns bad."""
    now = [1.0]
    model = Root(
        lambda root, x: root.head(unwrap(root.part(x))),
        part=Calls(lambda x: wrap(x, x.abs() * now[0])),
        head=nn.Linear(4, 4),
    )
    return spoiled(model, lambda: now.__setitem__(0, NAN))


@hostile(module="part", cause="invalid")
def a_tuple() -> Training:
    return returning(lambda good, bad: (good, bad), lambda out: out[0] + out[1])


@hostile(module="part", cause="invalid")
def a_part_that_nobody_uses() -> Training:
    return returning(lambda good, bad: (good, bad), lambda out: out[0])


@hostile(module="part", cause="invalid")
def a_dict_in_a_list() -> Training:
    return returning(lambda good, bad: [good, {"deep": {"deeper": bad}}], lambda out: out[1]["deep"]["deeper"])


Pair = namedtuple("Pair", "good bad")


@hostile(module="part", cause="invalid")
def a_named_tuple() -> Training:
    return returning(Pair, lambda out: out.bad)


@dataclass
class Result:
    good: Tensor
    bad: Tensor


@hostile(module="part", cause="invalid")
def a_dataclass() -> Training:
    return returning(Result, lambda out: out.bad)


class Plain:
    def __init__(self, good: Tensor, bad: Tensor) -> None:
        self.good, self.bad = good, bad


@hostile(module=("part", "head"), cause=("invalid", "upstream"))
def a_plain_object() -> Training:
    """It is not walked into: the next module shows it, and says only that it came in bad."""
    return returning(Plain, lambda out: out.bad)


@hostile(module="part", cause="invalid")
def a_transposed_view() -> Training:
    return returning(lambda good, bad: bad.t(), lambda out: out.t())


@hostile(module="part", cause="invalid")
def an_expanded_scalar() -> Training:
    now = [1.0]
    model = Root(
        lambda root, x: root.head(x + root.part(x)),
        part=Calls(lambda x: (x.mean() * now[0]).expand(4, 4)),
        head=nn.Linear(4, 4),
    )
    return spoiled(model, lambda: now.__setitem__(0, NAN))


@hostile(module="part", cause="invalid")
def a_scalar() -> Training:
    now = [1.0]
    model = Root(lambda root, x: root.head(x * root.part(x)), part=Calls(lambda x: x.mean() * now[0]), head=nn.Linear(4, 4))
    return spoiled(model, lambda: now.__setitem__(0, NAN))


@hostile(module=("part", "head"), cause=("invalid", "upstream", "overflow"), state=("nan", "inf"))
def a_complex_output() -> Training:
    now = [1.0]
    model = Root(
        lambda root, x: root.head(torch.fft.irfft(root.part(x), n=4)),
        part=Calls(lambda x: torch.fft.rfft(x) * now[0]),
        head=nn.Linear(4, 4),
    )
    return spoiled(model, lambda: now.__setitem__(0, NAN))


@hostile(module="part", cause="invalid")
def a_view_that_is_changed_in_place() -> Training:
    """An in-place ReLU follows: the output is as the module returned it, or as it is later, but it is bad."""
    now = [1.0]
    model = Root(
        lambda root, x: root.head(torch.relu_(root.part(x))), part=Calls(lambda x: x * now[0]), head=nn.Linear(4, 4)
    )
    return spoiled(model, lambda: now.__setitem__(0, NAN))


@hostile(module="part", cause="overflow", state="inf")
def an_inf_that_is_clamped_in_place() -> Training:
    """After the module has returned, its inf is clamped away in the same memory."""
    now = [1.0]
    model = Root(
        lambda root, x: root.head(root.part(x).clamp_(-1, 1)),
        part=Calls(lambda x: x * now[0] * now[0]),
        head=nn.Linear(4, 4),
    )
    return spoiled(model, lambda: now.__setitem__(0, 1e30))


@hostile(module=("head",), cause="upstream")
def an_output_that_is_poisoned_in_place_later() -> Training:
    """The module gave a finite tensor; the root's code wrote a nan into it."""
    now = [False]

    def forward(root: Root, x: Tensor) -> Tensor:
        out = root.first(x)
        if now[0]:
            out[1, 1] = NAN
        out2: Tensor = root.head(out)
        return out2

    model = Root(forward, first=nn.Linear(4, 4), head=nn.Linear(4, 4))
    return spoiled(model, lambda: now.__setitem__(0, True))


@hostile(module=("head",), cause="upstream")
def an_output_that_is_poisoned_through_data() -> Training:
    """The same, where the tensor's version does not change. `first` is innocent."""
    now = [False]

    def forward(root: Root, x: Tensor) -> Tensor:
        out = root.first(x)
        if now[0]:
            out.data[1, 1] = NAN
        out2: Tensor = root.head(out)
        return out2

    model = Root(forward, first=nn.Linear(4, 4), head=nn.Linear(4, 4))
    return spoiled(model, lambda: now.__setitem__(0, True))


@hostile(module=("part", "part.deep"), cause="invalid")
def jagged() -> Training:
    now = [1.0]
    model = Root(lambda root, x: root.part(x), part=Calls(lambda x: x * now[0]), first=nn.Linear(4, 4))

    def loss_of(number: int) -> Tensor:
        now[0] = NAN if number == BAD else 1.0
        rows = [root_of(model, torch.randn(length, 4)) for length in (2, 3)]
        out = model(torch.nested.nested_tensor(rows, layout=torch.jagged))
        loss: Tensor = out.values().square().mean() + model.first.weight.sum() * 0
        return loss

    return trained(model, loss_of)


def root_of(model: Root, x: Tensor) -> Tensor:
    return x


@hostile(module="part", cause="data")
def jagged_data() -> Training:
    model = Root(lambda root, x: root.part(x), part=nn.Linear(4, 4))

    def loss_of(number: int) -> Tensor:
        rows = [torch.full((length, 4), NAN if (number, length) == (BAD, 3) else 1.0) for length in (2, 3)]
        out = model(torch.nested.nested_tensor(rows, layout=torch.jagged))
        loss: Tensor = out.values().square().mean()
        return loss

    return trained(model, loss_of)


@hostile(module="", cause="gradient", label="grad_output")
def a_sparse_gradient() -> Training:
    """The rows that were read would turn bad in the step of batch 5."""
    model = Root(lambda root, tokens: root.table(tokens), table=nn.Embedding(20, 4, sparse=True))
    tokens = torch.arange(8)

    def loss_of(number: int) -> Any:
        out = model(tokens)
        return out.square().mean() + ((out * 0).square().sum().sqrt() if number == BAD else 0.0)

    return trained(model, loss_of)


@hostile(module="table", cause="weight", says="running")
def a_buffer_of_a_quantiser() -> Training:
    """A code book that is kept as a moving average."""

    class Quantise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running", torch.zeros(4))
            self.poison = False

        def forward(self, x: Tensor) -> Tensor:
            out = x + self.get_buffer("running")
            with torch.no_grad():
                self.get_buffer("running").lerp_(x.mean(0), 0.1)
            return out

    model = Root(lambda root, x: root.head(root.table(x)), table=Quantise(), head=nn.Linear(4, 4))
    return spoiled(model, lambda: model.table.running.fill_(NAN))


@hostile(module="part", cause="invalid")
def one_element_of_a_million() -> Training:
    now = [0.0]

    def write(x: Tensor) -> Tensor:
        out = x.expand(1000, 4, 4).contiguous().repeat(1, 8, 8)
        out[777, 20, 3] += now[0]
        return out

    model = Root(lambda root, x: root.head(root.part(x)[777, :4, :4]), part=Calls(write), head=nn.Linear(4, 4))
    return spoiled(model, lambda: now.__setitem__(0, NAN))


@hostile(module="deep.0.0.0.0", cause="overflow", state="inf")
def deep_within_wrappers() -> Training:
    scaled = Scaled()
    model = Root(lambda root, x: root.head(root.deep(x)), deep=chain(chain(chain(chain(scaled)))), head=nn.Linear(4, 4))
    return spoiled(model, lambda: setattr(scaled, "gain", 1e30))


@hostile(module="layers.1", cause="overflow", state="inf")
def in_a_compiled_model() -> Training:
    gain = torch.ones(())
    layers = nn.ModuleList([nn.Linear(4, 4), Calls(lambda x: x * gain * gain), nn.Linear(4, 4)])

    def forward(root: Root, x: Tensor) -> Tensor:
        for layer in root.layers:
            x = layer(x)
        return x

    model = Root(forward, layers=layers)
    compiled = torch.compile(model, backend="aot_eager")
    return trained(
        model, lambda n: compiled(torch.randn(4, 4)).square().mean(), before=lambda n: gain.fill_(1e30 if n == BAD else 1.0)
    )


@hostile(module="layers.0", cause="data", state=("inf", "nan"))
def data_of_a_compiled_model() -> Training:
    model = Root(lambda root, x: root.layers[1](root.layers[0](x)), layers=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    compiled = torch.compile(model, backend="aot_eager")
    return trained(model, lambda n: compiled(torch.full((4, 4), INF if n == BAD else 1.0)).square().mean())
