"""The loss is bad, or its scaler hides that a gradient is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from notebook import take_step
from trainings.case import Training
from trainings.parts import (
    BAD,
    NAN,
    Coder,
    Pair,
    Root,
    Square,
    averaged,
    chain,
    classified,
    kinked,
    labels,
    mean_of_kept,
    middle,
    trained,
)
from trainings.truths import BATCHES, healthy, hostile

UNDEFINED = ("invalid", "singular")
LAST = BATCHES - 1


def divided(at: int = BAD, **options: Any) -> Training:
    """0/0 by hand: its gradient is nan."""
    model = chain()
    return trained(model, averaged(model, at), **options)


hostile("", UNDEFINED, label="loss").each(no_label_is_left=divided)
hostile("", UNDEFINED, label="loss", check="batch").each(a_bad_loss_read_once_a_batch=divided)
hostile("", UNDEFINED, label="loss", check="async").each(a_bad_loss_read_later=divided)
hostile("", UNDEFINED, label="loss", every=4).each(a_bad_loss_between_the_full_batches=divided)
hostile("", UNDEFINED, label="loss", gradients=True).each(a_bad_loss_with_its_gradients=divided)
hostile("", UNDEFINED, label="loss", batch=6).each(
    # Accumulated over four batches, of which the third has no label.
    the_loss_of_a_micro_batch=lambda: divided(6, accumulate=4),
)
hostile("", UNDEFINED, label="loss", batch=LAST).each(the_loss_of_the_last_batch=lambda: divided(LAST))
hostile("", UNDEFINED, label="loss", batch=LAST, check="async").each(
    the_loss_of_the_last_batch_read_later=lambda: divided(LAST),
)


# --- losses that harm nothing -----------------------------------------------------------------------------------------


def ignored(at: int = BAD, **options: Any) -> Training:
    """Cross entropy over nothing is 0/0, and its gradient is 0: no weight ever turns bad."""
    model = chain()
    return trained(model, classified(model, at), **options)


HARMLESS = "HARMLESS_LOSS .loss"
hostile(notice=HARMLESS).each(all_labels_ignored=ignored)
hostile(notice=HARMLESS, check="batch").each(all_labels_ignored_and_read_once_a_batch=ignored)
hostile(notice=HARMLESS, check="async").each(all_labels_ignored_and_read_later=ignored)
hostile(notice=HARMLESS, gradients=True).each(all_labels_ignored_with_gradients=ignored)
hostile(notice=HARMLESS).each(all_labels_of_a_micro_batch_ignored=lambda: ignored(6, accumulate=4))
hostile("", UNDEFINED, label="loss", policy="strict").each(all_labels_ignored_and_strict=ignored)


@hostile(notice=HARMLESS)
def smoothed_labels_and_a_class_that_is_out() -> Training:
    """The smoothing multiplies the inf of a class that is masked: the loss is inf, and no gradient."""
    model = chain()

    def loss_of(number: int) -> Tensor:
        logits = model(torch.randn(4, 4)).masked_fill(torch.arange(4) == 3, -torch.inf)
        known = torch.randint(3, (4,))
        return nn.functional.cross_entropy(logits, known, label_smoothing=0.1 if number == BAD else 0.0)

    return trained(model, loss_of)


@hostile(notice=HARMLESS)
def an_entropy_that_is_only_told() -> Training:
    """The loss has a nan of numbers without a gradient: a metric that was added to it."""
    model = chain()
    return trained(model, lambda n: model(torch.randn(4, 4)).square().mean() + torch.tensor(0.0) / (n != BAD))


def of_output(loss: Callable[[Any, bool], Any], dtype: torch.dtype = torch.float32) -> Training:
    """The loss is a function of the output, and of whether the batch is the bad one."""
    model = chain().to(dtype)
    return trained(model, lambda n: loss(model(torch.randn(4, 4).to(dtype)), n == BAD))


def penalty(out: Any, is_bad: bool) -> Any:
    """A regularisation that no module computes."""
    return out.square().mean() + (NAN if is_bad else 0.0)


def divergence(out: Any, is_bad: bool) -> Any:
    """0 * log 0 in a hand-written KL divergence."""
    p = out.softmax(-1)
    if is_bad:
        p = p * torch.tensor([1.0, 1.0, 1.0, 0.0])
    return (p * p.log()).sum()


hostile("", ("singular", "overflow"), "inf", label="loss").each(
    log_of_a_probability_of_zero=lambda: of_output(lambda out, is_bad: -(out.softmax(-1) * (not is_bad)).log().mean()),
)
hostile("", "invalid", label="loss").each(
    root_of_a_negative_loss=lambda: of_output(lambda out, is_bad: (out.square().mean() - is_bad * 100.0).sqrt()),
)
hostile(notice=HARMLESS).each(
    mean_of_an_empty_selection=lambda: of_output(
        lambda out, is_bad: out[torch.arange(4) < (0 if is_bad else 2)].square().mean()
    ),
)
hostile(notice=HARMLESS).each(
    # A constant, and a sum past float16's end: their gradients are finite.
    a_bad_penalty=lambda: of_output(penalty),
    a_float16_sum_overflows=lambda: of_output(
        lambda out, is_bad: (out * 0 + 6e4).sum() if is_bad else out.mean(), torch.float16
    ),
)
hostile("", ("invalid", "overflow", "singular"), label="loss").each(
    a_divergence_of_distributions=lambda: of_output(divergence),
)


def gathered(out: Any, own: float, other: float) -> Any:
    """Rows are divided by their norms, and stand beside those of other ranks, which have no gradient here."""
    own_rows = out * torch.tensor([1.0, own, 1.0, 1.0])[:, None]
    rows = torch.cat([own_rows / own_rows.norm(dim=-1, keepdim=True), torch.full((4, 4), other)])
    return nn.functional.cross_entropy(10 * rows @ rows.T, torch.arange(8))


hostile("", "singular", "inf", label="loss", says="aten.log of 0 is inf").each(
    a_log_of_0_below_a_sum_over_the_last_dimension=lambda: of_output(
        lambda out, is_bad: (out.square() - (out.softmax(-1) * (not is_bad)).log()).sum(-1, keepdim=True).mean()
    ),
)
hostile("", "invalid", label="loss", says="aten.div of 0 and 0 is nan").each(
    a_row_of_zeros_beside_gathered_rows=lambda: of_output(lambda out, is_bad: gathered(out, float(not is_bad), 0.5)),
)
hostile("", "upstream", label="loss", says="aten.cat was given nan as its tensors", never="aten.mul").each(
    gathered_rows_that_are_nan=lambda: of_output(lambda out, is_bad: gathered(out, 1.0, NAN if is_bad else 0.5)),
)


@hostile("", ("invalid", "upstream", "data", "singular"), label="loss")
def bad_targets() -> Training:
    """Labels with a nan, which the model itself never sees."""
    model = chain()

    def loss_of(number: int) -> Tensor:
        targets = torch.randn(4, 4)
        if number == BAD:
            targets[2, 1] = NAN
        return nn.functional.mse_loss(model(torch.randn(4, 4)), targets)

    return trained(model, loss_of)


@hostile("", UNDEFINED, label="loss")
def a_bad_loss_before_a_bad_weight() -> Training:
    """A weight turns bad after the bad loss."""
    model = chain()

    def before(number: int) -> None:
        if number == BAD + 1:
            model[0].weight.data[1, 1] = NAN

    return trained(model, averaged(model), before=before)


@hostile("", UNDEFINED, label="loss")
def a_loss_of_decode() -> Training:
    """The root is never called."""
    model = Coder()
    return trained(model, averaged(model.coded))


# --- several losses ----------------------------------------------------------------------------------------------------


def backwards(backward: Callable[[Any, bool], object]) -> Training:
    """``backward`` is given the output, and whether the batch is the bad one."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        backward(model(torch.randn(4, 4)), number == BAD)
        take_step(optimizer)

    return Training(model, step)


@hostile("", UNDEFINED, label="loss[1]")
def one_of_two_losses() -> Training:
    """Both are handed over at once."""
    return backwards(
        lambda out, is_bad: torch.autograd.backward(
            (out.square().mean(), (out.mean() - 100).sqrt() if is_bad else out.mean())
        )
    )


@hostile("", UNDEFINED, label="loss")
def the_second_of_two_backwards() -> Training:
    def backward(out: Any, is_bad: bool) -> None:
        out.square().mean().backward(retain_graph=True)
        (out.abs().mean() - is_bad * 100.0).sqrt().backward()

    return backwards(backward)


@hostile("", UNDEFINED, label="loss", batch=(BAD, 2 * BAD + 1))
def the_loss_of_a_discriminator() -> Training:
    gan = Pair(nn.Tanh())
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (gan.generator, gan.discriminator)]

    def step(number: int) -> None:
        for index, optimizer in enumerate(optimizers):
            fake = gan.generator(torch.randn(4, 4))
            score = gan.discriminator(fake.detach() if index else fake)
            (score.square().mean() - (number == BAD and index == 1) * 100.0).sqrt().backward()
            optimizer.step()
            for each in optimizers:
                each.zero_grad()

    return Training(gan, step)


# --- under a scaler ----------------------------------------------------------------------------------------------------


def scaled(model: Any, loss_of: Callable[[int], Any], scale: float = 2.0**16) -> Training:
    return trained(model, loss_of, scaler=torch.amp.GradScaler("cpu", init_scale=scale))


def under_a_scaler(loss: Callable[[Any], Callable[[int], Tensor]]) -> Training:
    model = chain()

    def loss_of(number: int) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return loss(model)(number)

    return scaled(model, loss_of, 256.0)


hostile("", UNDEFINED, label="loss").each(
    # No scale makes a nan: the scaler would skip the steps and say nothing.
    a_bad_loss_under_a_scaler=lambda: under_a_scaler(averaged),
)
hostile(notice=HARMLESS).each(all_labels_ignored_under_a_scaler=lambda: under_a_scaler(classified))


@hostile("", ("overflow", "singular"), "inf", label="loss")
def an_infinite_loss_under_a_scaler() -> Training:
    """The loss is inf before it is scaled: not the scale's effect."""
    model = chain()
    return scaled(model, lambda n: -(model(torch.randn(4, 4)).softmax(-1) * (n < BAD)).log().mean(), 256.0)


@hostile("1", "overflow", "inf")
def a_forward_under_a_scaler() -> Training:
    """No scale changes the forward."""
    model = middle(Square())

    def loss_of(number: int) -> Any:
        with torch.autocast("cpu", torch.float16):
            return model(torch.randn(4, 4) * (1e4 if number == BAD else 1)).float().square().mean()

    return scaled(model, loss_of)


def kinked_for_ever() -> Training:
    """The gradient is bad from batch 5 on, whatever the scale: each step is skipped, and no weight turns bad."""
    model = chain()
    return scaled(model, lambda n: kinked(model(torch.randn(4, 4)), n >= BAD))


hostile(("2", ""), "gradient", ("inf", "nan"), batch=range(14, 17), says="batch 5", batches=40, gradients=True).each(
    no_scale_helps=kinked_for_ever,
)
hostile(("", "0", "2"), "gradient", ("inf", "nan"), batch=range(14, 40), says="batch 5", batches=60).each(
    no_scale_helps_by_default=kinked_for_ever,
)


@hostile(
    ("discriminator", "discriminator.2"),
    "gradient",
    ("nan", "inf"),
    batch=range(12, 80),
    says=f"batch {2 * BAD + 1}",  # each half of a step is a batch, as no module is the root of both
    batches=80,
    gradients=True,
)
def one_of_two_scalers() -> Training:
    """The generator's loss is finite and its gradient inf, for ever: its scaler shrinks to nothing. The other one is healthy."""
    gan = Pair(nn.Tanh())
    parts = (gan.generator, gan.discriminator)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in parts]

    def step(number: int) -> None:
        for index in (1, 0):
            fake = gan.generator(torch.randn(4, 4))
            loss = kinked(gan.discriminator(fake.detach() if index else fake), number >= BAD and not index)
            scalers[index].scale(loss).backward()
            scalers[index].step(optimizers[index])
            scalers[index].update()
            for optimizer in optimizers:
                optimizer.zero_grad()

    return Training(gan, step)


# --- the model's own ---------------------------------------------------------------------------------------------------


def given_labels(forward: Callable[..., Any], loss_of_output: Callable[[Any, Tensor], Any], **parts: nn.Module) -> Training:
    """The model is fed the labels, all of which are ignored in one batch."""
    model = Root(forward, net=chain(), **parts)

    def loss_of(number: int) -> Any:
        x, known = torch.randn(4, 4), labels(number == BAD)
        return loss_of_output(model(x, known), known)

    return trained(model, loss_of)


@hostile("", UNDEFINED, label="loss")
def a_loss_that_the_model_computes() -> Training:
    """A sum, which the training divides by the number of labels."""

    def forward(root: Root, x: Tensor, known: Tensor) -> dict[str, Tensor]:
        logits = root.net(x)
        return {"logits": logits, "scaled": mean_of_kept(logits, known.clamp(min=0)) * (known >= 0).sum()}

    return given_labels(forward, lambda out, known: out["scaled"] / (known >= 0).sum())


class HandMadeLoss(nn.Module):
    def forward(self, logits: Tensor, known: Tensor) -> Tensor:
        return mean_of_kept(logits, known)


def in_the_output(loss: Any) -> Training:
    """As in transformers."""

    def forward(root: Root, x: Tensor, known: Tensor) -> dict[str, Tensor]:
        logits = root.net(x)
        return {"loss": root.loss(logits, known) if isinstance(loss, nn.Module) else loss(logits, known), "logits": logits}

    return given_labels(forward, lambda out, _: out["loss"], **({"loss": loss} if isinstance(loss, nn.Module) else {}))


hostile("loss", UNDEFINED, label="output").each(a_loss_that_is_a_module=lambda: in_the_output(HandMadeLoss()))
hostile("", UNDEFINED, label="output[loss]").each(a_loss_in_the_roots_output=lambda: in_the_output(mean_of_kept))
hostile(notice="HARMLESS_LOSS").each(
    a_harmless_loss_that_is_a_module=lambda: in_the_output(nn.CrossEntropyLoss()),
)
hostile(notice="HARMLESS_LOSS .output[loss]").each(
    a_harmless_loss_in_the_roots_output=lambda: in_the_output(nn.functional.cross_entropy),
)


@healthy()
def a_measure_of_the_loss() -> Training:
    """A language model returns its perplexity, which is inf in some batches, and is only told."""

    def forward(root: Root, x: Tensor, known: Tensor) -> Any:
        loss = nn.functional.cross_entropy(root.net(x), known.clamp(min=0))
        return loss, {"ppl": (loss.detach() * (1.0 if (known >= 0).all() else 1e4)).exp()}

    return given_labels(forward, lambda out, _: out[0])


@healthy()
def a_loss_of_which_rows_are_masked() -> Training:
    """A speech recipe: the rows whose text does not fit are masked by the training."""

    def forward(root: Root, x: Tensor, known: Tensor) -> dict[str, Tensor]:
        logits = root.net(x).log_softmax(-1)
        each = logits.square().mean(-1)
        return {"loss": torch.where((known >= 0).all(), each, each.detach() / 0)}

    def masked(out: dict[str, Tensor], known: Tensor) -> Tensor:
        return out["loss"].masked_fill(out["loss"].isinf(), 0).mean()

    return given_labels(forward, masked)


def aligned(labels: list[int], frames: int, reduction: str = "mean") -> Training:
    """CTC: one row of three has another text in one batch, and as many frames."""
    model, loss = nn.Linear(4, 6), nn.CTCLoss(reduction=reduction)
    texts = [1, 2, 3, 4], [2, 3, 1, 5]

    def loss_of(number: int) -> Any:
        is_bad = number == BAD
        known = torch.tensor([*texts[0], *(labels if is_bad else texts[1]), *texts[0]])
        lengths = torch.tensor([4, len(labels) if is_bad else 4, 4])
        steps = torch.tensor([8, frames if is_bad else 8, 8])
        return loss(model(torch.randn(8, 3, 4)).log_softmax(-1), known, steps, lengths).sum()

    return trained(model, loss_of)


hostile("", "singular", "inf", label="loss", says="no alignment: row 1 has 2 frames for 4 labels:").each(
    a_text_that_does_not_fit=lambda: aligned([1, 2, 3, 4], 2),
)
hostile("", "singular", "inf", label="loss", says="row 1 has 5 frames for 4 labels, of which 2 repeat the one before").each(
    a_text_whose_letters_repeat=lambda: aligned([3, 3, 3, 4], 5, "sum"),
)


# --- a nan that the code writes where it has no number ----------------------------------------------------------------


def with_placeholder(write: Callable[[Tensor], Tensor], *, is_used: bool = False) -> Training:
    """The model returns it beside its output, from batch BAD on."""
    model: Any = Root(lambda own, x: own.two(x), layer=nn.Linear(4, 4))
    number = 0

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        made = model.layer(x)
        return made, write(made) if number >= BAD else made.detach()

    model.two = two
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: int) -> None:
        nonlocal number
        number = batch
        optimizer.zero_grad()
        made, beside = model(torch.randn(4, 4))
        (made.square().mean() * (beside.mean() if is_used else 1.0)).backward()
        optimizer.step()

    return Training(model, step)


hostile(notice="[HARMLESS_LOSS .output[1]]").each(
    a_nan_where_there_is_no_number=lambda: with_placeholder(lambda x: torch.full((2,), NAN)),
    a_nan_where_a_row_has_none=lambda: with_placeholder(lambda x: x.detach().masked_fill(x > 0, NAN)),
)
hostile("", "invalid", label="output[1]").each(
    a_nan_that_the_loss_takes_in=lambda: with_placeholder(lambda x: torch.full((2,), NAN), is_used=True)
)
hostile("", "invalid", label="output[1]").each(
    a_nan_that_is_multiplied_in=lambda: with_placeholder(lambda x: x.detach() * NAN)
)
