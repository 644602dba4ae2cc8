"""A loss outside of the model that is bad while the model's outputs are finite: the operator that made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from closeups import line_of, operator_of, the_only
from notebook import model_of, ones, unwatch, watched, watching
from rankwatch.errors import OverflowDetected
from rankwatch.rerun.loss_graph import Outputs, origin_after_backward
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.frame import Kind, State
from rankwatch.shared.types.trip import Cause, Trip
from rankwatch.shared.words.cause import advise, classify
from rankwatch.shared.words.closeup_text import fields_of

IGNORED = torch.tensor([-100, -100, -100])
INF = float("inf")


def trained(loss: Callable[[Tensor], Tensor], **options: Any) -> tuple[Trip, CloseUp]:
    """The trip of the first batch of a training with this loss."""
    model, _, notes = watching(policy="strict", **options)  # it stops at the loss, whatever its gradient
    with pytest.raises(OverflowDetected):
        loss(model(ones())).backward()  # backward
    (found,) = notes.closeups
    return notes.trip, found


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def focal(outputs: Tensor) -> Tensor:
    p = outputs.sigmoid() + 1  # above 1: their code forgot to clamp it
    return -(((1 - p) ** 0.5) * p.log()).mean()


def negative_variance(outputs: Tensor) -> Tensor:
    return (outputs.mean() ** 2 - (outputs**2).mean()).sqrt()


def divergence(outputs: Tensor) -> Tensor:
    p = functional.one_hot(outputs.argmax(-1), 2) * outputs.softmax(-1)
    return (p * (p.log() - outputs.log_softmax(-1))).sum()


def binary(outputs: Tensor) -> Tensor:
    p = outputs * 0 + 2
    return -(p.log() + (1 - p).log()).mean()


def several(outputs: Tensor) -> Tensor:
    terms = torch.stack([outputs.mean(), (outputs * 0).sum().rsqrt()])
    return outputs.mean() + 0.1 * outputs.var() + terms.sum()


def dice(outputs: Tensor) -> Tensor:
    overlap = (outputs * 0).sum()
    return 1 - 2 * overlap / (overlap + overlap)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * INF

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


MECHANISMS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "all labels ignored": (lambda x: functional.cross_entropy(x, IGNORED), "aten.nll_loss_forward.default", "ignored"),
    "classes without weight": (
        lambda x: functional.cross_entropy(x, torch.zeros(3, dtype=torch.long), weight=torch.tensor([0.0, 1.0])),
        "aten.nll_loss_forward.default",
        "no element",
    ),
    "no tokens": (
        lambda x: masked_mean(functional.cross_entropy(x, IGNORED, reduction="none"), torch.zeros(3)),
        "aten.div.Tensor",
        "0 / 0",
    ),
    "no tokens, counted": (lambda x: x.abs().sum() / 0, "aten.div.Tensor", "and 0 is inf"),
    "divided in place": (lambda x: x.exp().mean().div_(0), "aten.div.Tensor", "and 0 is inf"),
    "log of 0": (lambda x: -torch.log(x.softmax(-1) * 0).mean(), "aten.log.default", "aten.log of 0"),
    "log of a negative number": (lambda x: -torch.log(x.abs() - 9).mean() / 4, "aten.log.default", "negative"),
    "p outside of [0, 1]": (binary, "aten.log.default", "aten.log of -1"),
    "root of a negative variance": (negative_variance, "aten.sqrt.default", "negative"),
    "divergence with zeros": (divergence, "aten.log.default", "aten.log of 0"),
    "focal": (focal, "aten.pow.Tensor_Scalar", "fraction"),
    "dice of nothing": (dice, "aten.div.Tensor", "0 / 0"),
    "exp": (lambda x: (x.abs() * 1e3 + x.exp() * 1e3).exp().mean(), "aten.exp.default", "float32 ends"),
    "float16": (lambda x: functional.mse_loss((x.exp() * 1e3).half(), x.half()).float(), "aten.mse_loss.default", "float16"),
    "sum in float16": (lambda x: (x.sigmoid().half() * 6e4).sum(), "aten.sum.default", "float16"),
    "std of one": (lambda x: x[:1].std(0).mean(), "aten.std.correction", "one element"),
    "mean of none": (lambda x: x[x > 1e6].mean(), "aten.mean.default", "no elements"),
    "norm": (lambda x: (x / (x * 0).norm(dim=-1, keepdim=True)).sum(), "aten.div.Tensor", "is inf"),
    "a likelihood without variance": (
        lambda x: functional.gaussian_nll_loss(x, torch.ones(3, 2), x * 0, eps=0),
        "aten.div.Tensor",
        "and 0 is inf",
    ),
    "no alignment": (
        lambda x: functional.ctc_loss(
            x.log_softmax(-1)[:, None], torch.tensor([[1, 1, 1]]), torch.tensor([3]), torch.tensor([3])
        ),
        "aten._ctc_loss.default",
        "inf",
    ),
    "a fully masked row": (
        lambda x: -x.masked_fill(torch.ones(3, 2, dtype=torch.bool), -INF).log_softmax(-1).mean(),
        "aten._log_softmax.default",
        "fully masked",
    ),
    "a masked label": (
        lambda x: functional.cross_entropy(x.masked_fill(torch.tensor([True, False]), -INF), torch.tensor([0, 1, 1])),
        "aten._log_softmax.default",
        "a label that chooses such an element",
    ),
    "several terms": (several, "aten.rsqrt.default", "aten.rsqrt of 0"),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_operator_is_named(name: str) -> None:
    loss, operator, evidence = MECHANISMS[name]
    trip, found = trained(loss)
    assert (trip.culprit.kind, trip.frame.spec.module) == (Kind.LOSS, "")
    assert operator_of(trip).name == operator
    assert operator_of(trip).source is None
    assert "the model's output was finite" in classify(trip)[1]
    assert evidence in classify(trip)[1]
    assert f"backward was called at {__file__}:{line_of('backward', __file__)}" in found.note


@pytest.mark.parametrize("check", ["batch", "async"])
def test_it_is_named_where_numbers_are_read_later(check: str) -> None:
    model, _, notes = watching(check=check, policy="strict")
    trip, _ = the_only(notes, lambda: [functional.cross_entropy(model(ones()), IGNORED).backward() for _ in range(3)])
    assert operator_of(trip).name == "aten.nll_loss_forward.default"


def test_it_is_in_the_report() -> None:
    trip, found = trained(lambda x: functional.cross_entropy(x, IGNORED))
    cause, evidence = classify(trip)
    assert cause is Cause.INVALID
    fields = dict(fields_of(evidence, trip, found))
    assert fields["operator"].startswith("aten.nll_loss_forward; the line that called it is not known\n")
    assert "self (3, 2) float32, abs max" in fields["operator"]


def test_a_scaled_loss_is_followed_to_its_origin() -> None:
    model, scaler = model_of(), torch.amp.GradScaler("cpu")
    _, notes = watched(model, policy="strict")
    trip, _ = the_only(notes, scaler.scale(functional.cross_entropy(model(ones()), IGNORED) / 4).backward)
    assert operator_of(trip).name == "aten.nll_loss_forward.default"


def test_a_variable_of_the_users_tells_what_autograd_did_not_save() -> None:
    def overflow(outputs: Tensor) -> None:
        shifted = outputs + 1e3  # the sum saves nothing, and exp only its result
        shifted.exp().mean().backward()

    model, _, notes = watching(policy="strict")
    trip, _ = the_only(notes, overflow, model(ones()))
    operator = operator_of(trip)
    assert (operator.name, operator.inputs[0].abs_max > 900) == ("aten.exp.default", True)


def test_what_is_supposed_is_said() -> None:
    trip, found = trained(lambda x: (x + 1e3).exp().mean())
    assert (operator_of(trip).name, operator_of(trip).inputs) == ("aten.exp.default", ())
    assert "supposing that what autograd did not save was finite: a constant in aten.add.Tensor" in found.note


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda x: (x.masked_fill(x > 1e6, 0.0) * 2).sum() / 0, "one of aten.masked_fill.Scalar, aten.mul.Tensor"),
        (lambda x: x.mean() + torch.tensor(INF), "autograd did not save"),
        (lambda x: Doubled.apply(x).mean(), "the autograd.Function Doubled"),
        (lambda x: ((x + 1).half() * 1e30).mean(), "one of aten.add.Tensor, aten._to_copy.default, aten.mul.Tensor"),
    ],
)
def test_why_it_is_not_known(loss: Callable[[Tensor], Tensor], why: str) -> None:
    trip, found = trained(loss)
    assert trip.operator is None
    assert why in found.note


def difference(x: Tensor) -> Tensor:
    teacher = torch.full((3, 2), INF)
    loss: Tensor = (x - teacher).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("loss", "operator", "label"),
    [
        (lambda x: functional.mse_loss(x, torch.full((3, 2), INF)), "aten.mse_loss.default", "target"),
        (lambda x: (x * torch.tensor([1.0, INF])).square().mean(), "aten.mul.Tensor", "other operand"),
        (lambda x: (torch.full((3, 2), INF) - x).square().mean(), "aten.sub.Tensor", "operand"),
        (difference, "aten.sub.Tensor", "other operand: teacher"),
    ],
)
def test_what_a_finite_output_was_combined_with_is_named(loss: Any, operator: str, label: str) -> None:
    trip, _ = trained(loss)
    assert (operator_of(trip).name, operator_of(trip).output.state) == (operator, State.INF)
    assert f"was given inf as its {label}, which the model did not make" in classify(trip)[1]
    assert f"look at where the {label} of the loss comes from" in advise(Cause.UPSTREAM, trip, None)


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (lambda x: functional.cross_entropy(x, IGNORED), "it came out of aten.nll_loss_forward.default;"),
        (lambda x: (x - 9).log().mean(), "one of aten.sub.Tensor, aten.log.default and aten.mean.default;"),
    ],
)
def test_after_the_backward_the_operators_that_remain_are_named(loss: Callable[[Tensor], Tensor], names: str) -> None:
    """As where a loss is on a GPU."""
    outputs = Outputs()
    out = model_of()(ones())
    outputs.add([out])
    value = loss(out)
    value.backward()
    found = origin_after_backward(lambda: value, outputs)
    assert found.operator is None
    assert found.note.startswith("its operator is not known: this loss was read after its backward")
    assert names in found.note
    assert origin_after_backward(lambda: None, outputs).note in found.note


def test_a_backward_is_bitwise_as_without_a_watch() -> None:
    def gradients(is_watched: bool) -> list[Tensor]:
        model = model_of()
        if is_watched:
            watched(model, policy="off")
        torch.manual_seed(0)
        out = model(ones())
        (functional.dropout(out).exp().sum() / 0 + functional.cross_entropy(out, IGNORED)).backward()
        unwatch()
        return [torch.rand(1), *(value.grad for value in model.parameters() if value.grad is not None)]

    for with_it, without in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(with_it.nan_to_num(7), without.nan_to_num(7))


def test_a_bad_loss_that_is_tolerated_is_looked_at_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwatch.hook.loss.MAX_LOOKS", 0)
    _, found = trained(lambda x: functional.cross_entropy(x, IGNORED))
    assert "0 losses before were bad, too" in found.note
