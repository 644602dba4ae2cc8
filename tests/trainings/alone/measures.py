"""What a model measures beside its loss is bad: it has no part in the gradients, or it has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainings.case import Training
from trainings.parts import BAD, Root, Scaled, chain, trained
from trainings.truths import hostile


class Share(nn.Module):
    """The share of each class that the model finds: 0/0 for a class that no label is of."""

    def forward(self, logits: Tensor, known: Tensor) -> Tensor:
        found = torch.zeros(4).index_add(0, known, (logits.argmax(-1) == known).float())
        return found / torch.bincount(known, minlength=4)


class Shares(nn.Module):
    """Several measures, of which a further one is made, as of a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.share, self.mean = Share(), Root(lambda root, x: x.mean())

    @torch.no_grad()
    def forward(self, logits: Tensor, known: Tensor) -> dict[str, Tensor]:
        share = self.share(logits, known)
        return {"share": share, "mean": self.mean(share)}


def known_labels(number: int) -> Tensor:
    """In the bad batch no label is of the last class."""
    return torch.arange(8) % (3 if number == BAD else 4)


def measured_inside(share: nn.Module | None = None, **options: Any) -> Training:
    """The root returns it beside the logits."""

    def call(root: Any, x: Tensor, known: Tensor) -> Any:
        out = root.net(x)
        with torch.no_grad():
            return out, root.share(out, known)

    model = Root(call, net=chain(), share=share or Share())

    def loss_of(number: int) -> Tensor:
        known = known_labels(number)
        return nn.functional.cross_entropy(model(torch.randn(8, 4), known)[0], known)

    return trained(model, loss_of, **options)


@hostile(notice="HARMLESS_LOSS share.output")
def a_measure_that_the_loop_calls() -> Training:
    """As a step of Lightning does: it calls parts of the model, which itself is never called."""
    model: Any = Root(lambda root: None, net=chain(), share=Share())

    def loss_of(number: int) -> Any:
        known = known_labels(number)
        out = model.net(torch.randn(8, 4))
        model.share(out.detach(), known)
        return nn.functional.cross_entropy(out, known)

    return trained(model, loss_of)


ABSENT = "HARMLESS_LOSS share.output"
hostile(notice=ABSENT).each(a_measure_of_an_absent_class=measured_inside)
hostile(notice=ABSENT, check="batch").each(a_measure_that_is_read_once_a_batch=measured_inside)
hostile(notice=ABSENT, check="async").each(a_measure_that_is_read_later=measured_inside)
hostile(notice=ABSENT, every=4).each(a_measure_between_the_full_batches=measured_inside)
hostile(notice=ABSENT).each(a_measure_in_a_step_of_two=lambda: measured_inside(accumulate=2))
hostile(notice="HARMLESS_LOSS share.share.output").each(measures_of_measures=lambda: measured_inside(Shares()))
hostile(notice="HARMLESS_LOSS", every=4).each(measures_of_measures_between=lambda: measured_inside(Shares()))
hostile("share", "invalid", policy="strict").each(a_measure_under_strict=measured_inside)


@hostile("share", "invalid", says="0 / 0")
def a_measure_that_weights_the_loss() -> Training:
    """The share of the absent class is a factor of the loss."""

    def call(root: Any, x: Tensor, known: Tensor) -> Any:
        out = root.net(x)
        return out * (1 + root.share(out.detach(), known))

    model = Root(call, net=chain(), share=Share())

    def loss_of(number: int) -> Tensor:
        known = known_labels(number)
        return nn.functional.cross_entropy(model(torch.randn(8, 4), known), known)

    return trained(model, loss_of)


@hostile("share", "invalid", says="0 / 0")
def a_measure_that_is_a_target() -> Training:
    """The loop weights its loss by what the root returns beside the logits."""

    def call(root: Any, x: Tensor, known: Tensor) -> Any:
        out = root.net(x)
        with torch.no_grad():
            return out, root.share(out, known)

    model = Root(call, net=chain(), share=Share())

    def loss_of(number: int) -> Any:
        known = known_labels(number)
        out, share = model(torch.randn(8, 4), known)
        return (nn.functional.cross_entropy(out, known, reduction="none") * (2 - share.mean())).mean()

    return trained(model, loss_of)


@hostile("scaled", "overflow", "inf")
def an_overflow_beside_a_measure() -> Training:
    """In the same forward a module overflows, which has nothing to do with the measure."""
    scaled = Scaled()

    def call(root: Any, x: Tensor, known: Tensor) -> Any:
        out = root.net(x)
        root.share(out.detach(), known)
        return root.scaled(out)

    model = Root(call, net=chain(), share=Share(), scaled=scaled)

    def loss_of(number: int) -> Any:
        scaled.gain = 1e30 if number == BAD else 1.0
        return model(torch.randn(8, 4), known_labels(number)).square().mean()

    return trained(model, loss_of)
