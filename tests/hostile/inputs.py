"""What the root is fed is bad, or looks bad and is not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import Calls
from trainings import Root, Scaled, Square, Training, chain, trained

from .case import BAD, INF, NAN, fed, hostile, put


@hostile(module="0", cause="data")
def one_nan() -> Training:
    return fed(chain(), lambda x: put(x, NAN, 2, 1))


@hostile(module="0", cause="data", state=("inf", "nan"))
def one_inf() -> Training:
    return fed(chain(), lambda x: put(x, INF, 2, 1))


@hostile(module="0", cause="data", check="async")
def one_nan_read_later() -> Training:
    return fed(chain(), lambda x: put(x, NAN, 2, 1))


@hostile(module="0", cause="data", batch=8, every=4)
def one_nan_in_a_full_batch() -> Training:
    return fed(chain(), lambda x: put(x, NAN, 2, 1), at=8)


@hostile(module="0", cause="data", batch=6, every=4)
def one_nan_between_the_full_batches() -> Training:
    return fed(chain(), lambda x: put(x, NAN, 2, 1), at=6)


@hostile(module="net.0", cause="data")
def an_inf_that_the_root_turns_to_nan() -> Training:
    """(x - mean) / std in the root's forward."""
    model = Root(lambda root, x: root.net((x - x.mean()) / x.std()), net=chain())
    return fed(model, lambda x: put(x, INF, 2, 1))


@hostile(module="net.0", cause="data")
def an_inf_that_becomes_nan_after_a_module() -> Training:
    """A finite module that does not touch the bad feature runs first."""
    model = Root(lambda root, x: root.net(root.other(x[:, :3]) + (x - x.mean(0))), other=nn.Linear(3, 4), net=chain())
    return fed(model, lambda x: put(x, INF, 2, 3))


@hostile(module="net.0", cause="data", label="output")
def in_a_dict() -> Training:
    model = Root(lambda root, batch: root.net(batch["features"]["x"]), net=chain())
    return trained(
        model, lambda n: model({"id": n, "features": {"x": torch.full((4, 4), NAN if n == BAD else 1.0)}}).square().mean()
    )


@dataclass
class Sample:
    x: Tensor
    name: str


@hostile(module="net.0", cause="data")
def in_a_dataclass() -> Training:
    model = Root(lambda root, sample: root.net(sample.x), net=chain())
    return trained(model, lambda n: model(Sample(torch.full((4, 4), NAN if n == BAD else 1.0), "a")).square().mean())


@hostile(module="net.0", cause="data")
def by_keyword() -> Training:
    model = Root(lambda root, x: root.net(x), net=chain())
    return trained(model, lambda n: model(x=torch.full((4, 4), NAN if n == BAD else 1.0)).square().mean())


@hostile(module="net.0", cause="data")
def in_a_list_of_tensors() -> Training:
    model = Root(lambda root, xs: root.net(torch.stack(xs)), net=chain())
    return trained(
        model, lambda n: model([torch.full((4,), NAN if (n, row) == (BAD, 3) else 1.0) for row in range(4)]).square().mean()
    )


@hostile(module="0", cause="data")
def a_nan_that_the_loader_leaves_by_chance() -> Training:
    """A division by the standard deviation of a constant feature, before the model."""

    def spoil(x: Tensor) -> None:
        x[:, 2] = 1.0
        x.sub_(x.mean(0)).div_(x.std(0))

    return fed(chain(), spoil)


@hostile(module="0", cause="data", batch=0)
def in_the_first_batch() -> Training:
    return fed(chain(), lambda x: put(x, NAN, 0, 0), at=0)


@hostile(module=("cast.0", "0", "net.0"), cause=("overflow", "upstream", "data"), state=("inf", "nan"))
def a_cast_of_a_finite_input() -> Training:
    """1e300 is finite in float64; the root's own code casts it to float32."""
    model = Root(lambda root, x: root.net(x.float()), net=chain())
    return trained(model, lambda n: model(torch.randn(4, 4).double() * (1e300 if n == BAD else 1.0)).square().mean())


# --- masks ------------------------------------------------------------------------------------------------------------


def additive(length: int = 4) -> Tensor:
    return torch.full((length, length), -INF).triu(1)


class Masked(nn.Module):
    """Scores, a mask that is added to them, and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.soft, self.gain, self.out = nn.Linear(4, 4), nn.Softmax(-1), Scaled(), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.out(self.gain(self.soft(self.score(x) + mask)))
        return out


def masked(**where: float) -> Training:
    """A mask is a root input in each batch; in one batch the gain or the input is bad."""
    model = Masked()

    def loss_of(number: int) -> Tensor:
        model.gain.gain = where.get("gain", 1.0) if number == BAD else 1.0
        x = torch.randn(4, 4)
        if "data" in where and number == BAD:
            x[1, 2] = where["data"]
        loss: Tensor = model(x, mask=additive()).square().mean()
        return loss

    return trained(model, loss_of)


@hostile(module="gain", cause=("overflow", "invalid"), state=("inf", "nan"), never="mask")
def an_overflow_beside_a_mask() -> Training:
    return masked(gain=1e30)


@hostile(module="gain", cause="invalid", never="mask")
def a_nan_beside_a_mask() -> Training:
    return masked(gain=NAN)


@hostile(module="score", cause="data", never="mask")
def bad_data_beside_a_mask() -> Training:
    return masked(data=NAN)


@hostile(module="score", cause="data", state=("inf", "nan"), never="mask")
def infinite_data_beside_a_mask() -> Training:
    return masked(data=-INF)


@hostile(module="gain", cause="overflow", batch=6, state="inf", never="mask", every=4)
def an_overflow_beside_a_mask_between_the_full_batches() -> Training:
    model = Masked()

    def loss_of(number: int) -> Tensor:
        model.gain.gain = 1e30 if number == 6 else 1.0
        loss: Tensor = model(torch.randn(4, 4), additive()).square().mean()
        return loss

    return trained(model, loss_of)


@hostile(module="soft", cause=("invalid", "data", "upstream", "singular"))
def a_row_that_is_masked_wholly() -> Training:
    """The additive mask has a row of nothing but -inf, for the first time."""
    model = Masked()

    def loss_of(number: int) -> Tensor:
        mask = additive()
        if number == BAD:
            mask[2] = -INF
        loss: Tensor = model(torch.randn(4, 4), mask).square().mean()
        return loss

    return trained(model, loss_of)


@hostile(module=("attention", "layer.self_attn", "self_attn"), cause=("invalid", "singular"))
def padding_over_a_whole_row() -> Training:
    """key_padding_mask is True for all of a sample."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = Root(lambda root, x, pad: root.attention(x, x, x, key_padding_mask=pad)[0], attention=attention)

    def loss_of(number: int) -> Tensor:
        pad = torch.zeros(2, 5, dtype=torch.bool)
        pad[1, 0 if number == BAD else 3 :] = True
        loss: Tensor = model(torch.randn(2, 5, 8), pad).square().mean()
        return loss

    return trained(model, loss_of)


@hostile(module="2", cause="overflow", state="inf", never="mask")
def an_overflow_after_a_marked_mask() -> Training:
    """The user marks the mask with detect_overflow in each batch: it is -inf in good batches too."""
    return masked_and_marked()


def masked_and_marked() -> Training:
    import rankwatch

    mask, scaled = additive(), Scaled()

    def attend(x: Tensor) -> Tensor:
        rankwatch.detect_overflow(x.detach(), "scores")
        return (x + mask).softmax(-1)

    model = chain(nn.Linear(4, 4), Calls(attend), scaled)
    return trained(
        model,
        lambda n: model(torch.randn(4, 4)).square().mean(),
        before=lambda n: setattr(scaled, "gain", 1e30 if n == BAD else 1.0),
    )


@hostile(module=("blocks.1.gain",), cause=("overflow",), state="inf", never=("mask", "between modules"))
def a_later_block_with_the_mask_as_input() -> Training:
    """Each block gets the -inf mask as an input; the first two have a finite output with it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.out = Scaled(), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.out(self.gain((x + mask).softmax(-1)))
            return out

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, additive())
            return x

    model = Stack()
    gain = model.get_submodule("blocks.1.gain")
    return trained(
        model,
        lambda n: model(torch.randn(4, 4)).square().mean(),
        before=lambda n: setattr(gain, "gain", 1e30 if n == BAD else 1.0),
    )


@hostile(module="attend", cause="overflow", state=("inf", "nan"), never=("mask was", "between modules"))
def a_module_with_a_mask_for_its_own_input() -> Training:
    """One module adds the mask itself, and overflows: the mask is an input of its own, never bad evidence."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = 1.0

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x + mask).softmax(-1) * self.gain * self.gain

    model = Root(lambda root, x, mask: root.attend(root.first(x), mask), first=nn.Linear(4, 4), attend=Attend())
    return trained(
        model,
        lambda n: model(torch.randn(4, 4), additive()).square().mean(),
        before=lambda n: setattr(model.attend, "gain", 1e30 if n == BAD else 1.0),
    )


@hostile(module="1", cause="overflow", state="inf")
def a_large_sample_among_small_ones() -> Training:
    """One row of the batch is an outlier: finite as it comes."""
    return fed(chain(nn.Linear(4, 8), Square(), nn.Linear(8, 4)), lambda x: x[3].mul_(1e25))
