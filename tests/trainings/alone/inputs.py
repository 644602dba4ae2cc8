"""What the root is fed is bad, or looks bad and is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rankwatch
from models import Calls
from trainings.case import Training
from trainings.parts import BAD, INF, NAN, Gain, Root, Scaled, chain, fed, put, trained, turned
from trainings.truths import BATCHES, healthy, hostile

LAST = BATCHES - 1


def fed_one(value: float = NAN, at: int = BAD, model: Any = None) -> Training:
    return fed(model or chain(), lambda x: put(x, value, 2, 1), at)


def constant_feature(x: Tensor) -> None:
    """The loader divides by the standard deviation of a constant."""
    x[:, 2] = 1.0
    x.sub_(x.mean(0)).div_(x.std(0))


def bad_weight_too() -> Training:
    model = chain()
    return fed(model, lambda x: (put(x, NAN, 1, 1), put(model[2].weight, NAN, 1, 1)))


hostile("0", "data").each(
    one_nan=fed_one,
    a_nan_that_the_loader_leaves_by_chance=lambda: fed(chain(), constant_feature),
    data_in_eval_mode=lambda: fed_one(model=chain().eval()),
    bad_data_and_a_bad_weight=bad_weight_too,
)
hostile("0", "data", ("inf", "nan")).each(one_inf=lambda: fed_one(INF))
hostile("0", "data", check="async").each(one_nan_read_later=fed_one)
hostile("0", "data", batch=8, every=4).each(one_nan_in_a_full_batch=lambda: fed_one(at=8))
hostile("0", "data", batch=6, every=4).each(one_nan_between_the_full_batches=lambda: fed_one(at=6))
hostile("0", "data", batch=0).each(in_the_first_batch=lambda: fed_one(at=0))
hostile("0", "data", batch=LAST).each(data_of_the_last_batch=lambda: fed_one(at=LAST))
hostile("0", "data", batch=LAST, check="async").each(data_of_the_last_batch_read_later=lambda: fed_one(at=LAST))


@hostile("net.0", "data")
def an_inf_that_the_root_turns_to_nan() -> Training:
    """(x - mean) / std in the root's forward."""
    return fed_one(INF, model=Root(lambda root, x: root.net((x - x.mean()) / x.std()), net=chain()))


@hostile("net.0", "data")
def an_inf_that_becomes_nan_after_a_module() -> Training:
    """A finite module that does not touch the bad feature runs first."""
    model = Root(lambda root, x: root.net(root.other(x[:, :3]) + (x - x.mean(0))), other=nn.Linear(3, 4), net=chain())
    return fed(model, lambda x: put(x, INF, 2, 3))


# --- containers --------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    x: Tensor
    name: str


class Columns(dict[str, Tensor]):
    """Like a TensorDict: a mapping without a truth value, that iterates over its rows."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")

    def __iter__(self) -> Any:
        return (Columns({name: column[row] for name, column in self.items()}) for row in range(4))


class Unread(dict[str, Tensor]):
    """What cannot be walked: its values are read from a file that is closed."""

    def __getitem__(self, key: str) -> Tensor:
        raise OSError("closed")


def contained(forward: Callable[..., Any], call: Callable[[Any, Callable[..., Tensor], int], Any]) -> Training:
    """``call`` feeds the model what is full of ones, and in one batch of nan."""
    model = Root(forward, net=chain())
    return trained(
        model,
        lambda n: call(model, lambda *sizes: torch.full(sizes or (4, 4), NAN if n == BAD else 1.0), n).square().mean(),
    )


hostile("net.0", "data", label="output").each(
    in_a_dict=lambda: contained(
        lambda root, batch: root.net(batch["features"]["x"]),
        lambda model, full, n: model({"id": n, "features": {"x": full()}}),
    ),
)
hostile("net.0", "data").each(
    in_a_dataclass=lambda: contained(
        lambda root, sample: root.net(sample.x), lambda model, full, n: model(Sample(full(), "a"))
    ),
    in_a_mapping_that_iterates_over_rows=lambda: contained(
        lambda root, batch: root.net(batch["x"]), lambda model, full, n: model(Columns(x=full()))
    ),
    beside_what_cannot_be_walked=lambda: contained(
        lambda root, x, file: root.net(x), lambda model, full, n: model(full(), Unread(x=full()))
    ),
    by_keyword=lambda: contained(lambda root, x: root.net(x), lambda model, full, n: model(x=full())),
    in_a_list_of_tensors=lambda: contained(
        lambda root, xs: root.net(torch.stack(xs)), lambda model, full, n: model([torch.ones(4)] * 3 + [full(4)])
    ),
)


@hostile("", "data", label="output[loss]")
def in_what_only_the_loss_takes_in() -> Training:
    """The root returns its loss beside what is finite, as an objective of TorchRL does; the advantages alone are bad."""

    def forward(root: Root, x: Tensor, gain: Tensor) -> dict[str, Tensor]:
        return {"loss": (root.net(x).sum(1) * gain).mean(), "size": x.abs().mean()}

    model = Root(forward, net=chain())
    return trained(model, lambda n: model(torch.randn(4, 4), put(torch.randn(4), NAN if n == BAD else 1.0, 1))["loss"])


@hostile(("cast.0", "0", "net.0"), ("overflow", "upstream", "data"), ("inf", "nan"))
def a_cast_of_a_finite_input() -> Training:
    """1e300 is finite in float64; the root's own code casts it to float32."""
    model = Root(lambda root, x: root.net(x.float()), net=chain())
    return trained(model, lambda n: model(torch.randn(4, 4).double() * (1e300 if n == BAD else 1.0)).square().mean())


@hostile("0", "data", batch=4)
def data_of_an_evaluation() -> Training:
    """After batch 4, in eval mode."""
    model = chain()

    def after(number: int) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.full((4, 4), NAN if number == 4 else 1.0))
        model.train()

    return trained(model, after=after)


# --- masks ------------------------------------------------------------------------------------------------------------


def additive() -> Tensor:
    return torch.full((4, 4), -INF).triu(1)


class Masked(nn.Module):
    """Scores, a mask that is added to them, and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.soft, self.gain, self.out = nn.Linear(4, 4), nn.Softmax(-1), Scaled(), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.out(self.gain(self.soft(self.score(x) + mask)))


def masked(spoil: Callable[[Masked, Tensor, Tensor], object], at: int = BAD) -> Training:
    """A mask is a root input in each batch; in one batch something is done to the model, the input or the mask."""
    model = Masked()

    def loss_of(number: int) -> Any:
        x, mask = torch.randn(4, 4), additive()
        if number == at:
            spoil(model, x, mask)
        return model(x, mask=mask).square().mean()

    return trained(model, loss_of)


def gains(value: float) -> Callable[[Masked, Tensor, Tensor], object]:
    return lambda model, x, mask: setattr(model.gain, "gain", value)


hostile("gain", ("overflow", "invalid"), ("inf", "nan"), never="mask").each(
    an_overflow_beside_a_mask=lambda: masked(gains(1e30)),
)
hostile("gain", "invalid", never="mask").each(a_nan_beside_a_mask=lambda: masked(gains(NAN)))
hostile("gain", "overflow", "inf", batch=6, never="mask", every=4).each(
    an_overflow_beside_a_mask_between_the_full_batches=lambda: masked(gains(1e30), at=6),
)
hostile("gain", "overflow", ("inf", "nan"), batch=0, never="mask").each(
    # No good batch had the mask before.
    an_overflow_beside_a_mask_in_the_first_batch=lambda: masked(gains(1e30), at=0),
)
hostile("score", "data", never="mask").each(bad_data_beside_a_mask=lambda: masked(lambda _, x, mask: put(x, NAN, 1, 2)))
hostile("score", "data", ("inf", "nan"), never="mask").each(
    infinite_data_beside_a_mask=lambda: masked(lambda _, x, mask: put(x, -INF, 1, 2)),
)
hostile("soft", ("invalid", "data", "upstream", "singular")).each(
    # The additive mask has a row of nothing but -inf, for the first time.
    a_row_that_is_masked_wholly=lambda: masked(lambda _, x, mask: mask[2].fill_(-INF)),
)
hostile("soft", ("data", "upstream")).each(
    # The mask was -inf in good batches; -inf * 0 is nan.
    a_mask_that_turns_to_nan=lambda: masked(lambda _, x, mask: mask.mul_(0.0)),
)


@hostile(("attention", "layer.self_attn", "self_attn"), ("invalid", "singular"))
def padding_over_a_whole_row() -> Training:
    """key_padding_mask is True for all of a sample."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = Root(lambda root, x, pad: root.attention(x, x, x, key_padding_mask=pad)[0], attention=attention)

    def loss_of(number: int) -> Any:
        pad = torch.zeros(2, 5, dtype=torch.bool)
        pad[1, 0 if number == BAD else 3 :] = True
        return model(torch.randn(2, 5, 8), pad).square().mean()

    return trained(model, loss_of)


@hostile("2", "overflow", "inf", never="mask")
def an_overflow_after_a_marked_mask() -> Training:
    """The user marks the scores with detect_overflow in each batch; the mask is -inf in good batches too."""
    mask, scaled = additive(), Scaled()

    def attend(x: Tensor) -> Tensor:
        rankwatch.detect_overflow(x.detach(), "scores")
        return (x + mask).softmax(-1)

    return turned(scaled, 1e30, chain(nn.Linear(4, 4), Calls(attend), scaled))


@hostile(("1", "0"), ("upstream", "invalid"), label="scores")
def a_mark() -> Training:
    """Between two modules, the user marks a tensor that is nan."""

    def score(x: Tensor, gain: float) -> Tensor:
        scores = x * gain
        rankwatch.detect_overflow(scores, "scores")
        return scores.nan_to_num()

    part = Gain(score)
    return turned(part, NAN, chain(nn.Linear(4, 4), part, nn.Linear(4, 4)))


@hostile("blocks.1.gain", "overflow", "inf", never=("mask", "between modules"))
def a_later_block_with_the_mask_as_input() -> Training:
    """Each block gets the -inf mask as an input; the first two have a finite output with it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.out = Scaled(), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return self.out(self.gain((x + mask).softmax(-1)))

    def forward(root: Root, x: Tensor) -> Tensor:
        for each in root.blocks:
            x = each(x, additive())
        return x

    model = Root(forward, blocks=nn.ModuleList(Block() for _ in range(3)))
    return turned(model.blocks[1].gain, 1e30, model)


@hostile("attend", "overflow", ("inf", "nan"), never=("mask was", "between modules"))
def a_module_with_a_mask_for_its_own_input() -> Training:
    """One module adds the mask itself, and overflows: the mask is an input of its own, never bad evidence."""

    class Attend(Scaled):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward((x + mask).softmax(-1))

    model = Root(lambda root, x, mask: root.attend(root.first(x), mask), first=nn.Linear(4, 4), attend=Attend())
    return turned(model.attend, 1e30, model, lambda n: model(torch.randn(4, 4), additive()).square().mean())


def bounded(forward: Callable[..., Any], spoil: Callable[[Root, Tensor], object], **parts: nn.Module) -> Training:
    """Some of the bounds that the root is fed are infinite, in good batches too."""
    model, bounds = Root(forward, **parts), torch.tensor([INF, 1.0, INF, 2.0])

    def loss_of(number: int) -> Any:
        x = torch.full((4, 4), 0.5)
        if number == BAD:
            spoil(model, x)
        return model(x=x, bounds=bounds).square().mean()

    return trained(model, loss_of)


@hostile("net.0", "data", never="bounds", says="input[x] of the root")
def bad_data_beside_infinite_bounds() -> Training:
    return bounded(lambda root, x, bounds: root.net(x.clamp(-bounds, bounds)), lambda root, x: x.fill_(NAN), net=chain())


@hostile("head", "overflow", ("inf", "nan"), never="bounds")
def an_overflow_beside_infinite_bounds() -> Training:
    return bounded(
        lambda root, x, bounds: root.head(root.first(x).clamp(-bounds, bounds)),
        lambda root, x: setattr(root.head, "gain", 1e30),
        first=nn.Linear(4, 4),
        head=Scaled(),
    )


# --- an inf that the code writes ------------------------------------------------------------------------------------------


class Actions(nn.Linear):
    """Some of the actions are not allowed: ``write`` puts an inf in their place."""

    def __init__(self, write: Callable[[Actions, Tensor], Tensor]) -> None:
        super().__init__(8, 5)
        self.write = write
        self.allowed = torch.tensor([True, True, True, False, False])
        self.mask: Tensor
        self.register_buffer("mask", torch.full((5,), -INF).masked_fill(self.allowed, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, super().forward(x))


def assigned(scores: Tensor, at: Any) -> Tensor:
    scores = scores.clone()
    scores[:, at] = -INF
    return scores


def masking(
    write: Callable[[Actions, Tensor], Tensor], *after: nn.Module, spoil: Callable[[Any], object] = lambda model: None
) -> Training:
    model = Root(lambda root, x: root.after(root.head(x)), head=Actions(write), after=nn.Sequential(*after))

    def step(number: int) -> Tensor:
        if number == BAD:
            spoil(model)
        return nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 0]))

    return trained(model, step)


def filled(head: Actions, scores: Tensor) -> Tensor:
    return scores.masked_fill(~head.allowed, -INF)


healthy().each(
    actions_that_are_filled=lambda: masking(filled),
    actions_that_are_filled_with_a_tensor=lambda: masking(lambda p, z: z.masked_fill(~p.allowed, torch.tensor(-INF))),
    actions_that_are_chosen=lambda: masking(lambda p, z: torch.where(p.allowed, z, -INF)),
    actions_that_are_chosen_from_a_tensor=lambda: masking(lambda p, z: torch.where(p.allowed, z, torch.full_like(z, -INF))),
    actions_that_are_assigned=lambda: masking(lambda p, z: assigned(z, ~p.allowed)),
    the_last_actions_that_are_assigned=lambda: masking(lambda p, z: assigned(z, slice(3, None))),
    actions_to_which_a_buffer_is_added=lambda: masking(lambda p, z: z + p.mask),
    actions_to_which_the_log_of_a_mask_is_added=lambda: masking(lambda p, z: z + p.allowed.float().log()),
    actions_without_those_of_a_mask=lambda: masking(lambda p, z: z + torch.log2(1 - p.mask.isinf().to(z.dtype))),
    actions_that_are_put_behind_others=lambda: masking(lambda p, z: nn.functional.pad(z[:, :3], (0, 2), value=-INF)),
    actions_whose_logarithms_are_returned=lambda: masking(lambda p, z: filled(p, z).log_softmax(-1)),
    actions_that_go_through_modules=lambda: masking(filled, nn.Identity(), nn.LogSoftmax(-1), nn.Identity()),
    costs_of_actions=lambda: masking(lambda p, z: -filled(p, z), Calls(lambda costs: -costs)),
)
healthy(check="batch").each(actions_that_are_judged_at_the_end=lambda: masking(filled, nn.LogSoftmax(-1)))
healthy(check="async").each(actions_that_are_judged_later=lambda: masking(filled, nn.LogSoftmax(-1)))
healthy(every=4).each(actions_between_full_batches=lambda: masking(filled, nn.LogSoftmax(-1)))

hostile("after.0", "upstream", says="the code writes an inf into the output of head").each(
    a_nan_that_is_made_of_a_written_inf=lambda: masking(filled, Scaled(), spoil=lambda p: setattr(p.after[0], "gain", 0.0)),
)
hostile("", "invalid", label="loss", says="the code writes an inf").each(
    no_action_is_left=lambda: masking(lambda p, z: z + p.mask, spoil=lambda model: model.head.mask.fill_(-INF)),
)
hostile("head", "overflow", ("inf", "nan"), batch=0).each(
    an_overflow_beside_written_infs=lambda: masking(lambda p, z: filled(p, (z * 1e20).exp())),
)
hostile("head", "overflow", "inf", batch=0).each(
    an_inf_in_all_that_is_written=lambda: masking(lambda p, z: torch.full_like(z, INF)),
)
hostile("head", "singular", "inf", batch=0, says="aten.log of 0").each(
    a_log_of_a_choice_that_is_learnt=lambda: masking(lambda p, z: (z * 1e30).softmax(-1).log()),
)
hostile("head", "overflow", "inf", batch=0, policy="strict").each(a_written_inf_under_strict=lambda: masking(filled))
