"""The loss is bad, or its scaler hides that a gradient is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainings import Root, Training, chain, trained

from .case import BAD, NAN, hostile

OF_LOSS: dict[str, Any] = {"module": "", "label": "loss"}


@hostile(**OF_LOSS, cause=("invalid", "singular"))
def all_labels_ignored() -> Training:
    """Cross entropy over nothing is 0/0, and its gradient is 0: no weight ever turns bad."""
    model = chain()

    def loss_of(number: int) -> Tensor:
        labels = torch.full((4,), -100) if number == BAD else torch.randint(4, (4,))
        return nn.functional.cross_entropy(model(torch.randn(4, 4)), labels)

    return trained(model, loss_of)


@hostile(**OF_LOSS, cause=("singular", "overflow"), state="inf")
def log_of_a_probability_of_zero() -> Training:
    model = chain()

    def loss_of(number: int) -> Any:
        likely = model(torch.randn(4, 4)).softmax(-1)
        return -(likely * (number != BAD)).log().mean()

    return trained(model, loss_of)


@hostile(**OF_LOSS, cause="invalid")
def root_of_a_negative_loss() -> Training:
    model = chain()
    return trained(model, lambda number: (model(torch.randn(4, 4)).square().mean() - (number == BAD) * 100.0).sqrt())


@hostile(**OF_LOSS, cause=("invalid", "singular"))
def mean_of_an_empty_selection() -> Training:
    model = chain()

    def loss_of(number: int) -> Any:
        out = model(torch.randn(4, 4))
        return out[torch.arange(4) < (0 if number == BAD else 2)].square().mean()

    return trained(model, loss_of)


@hostile(**OF_LOSS, cause=("invalid", "upstream", "data", "singular"))
def a_bad_penalty() -> Training:
    """A regularisation that no module computes."""
    model = chain()
    return trained(model, lambda number: model(torch.randn(4, 4)).square().mean() + (NAN if number == BAD else 0.0))


@hostile(**OF_LOSS, cause=("invalid", "upstream", "data", "singular"))
def bad_targets() -> Training:
    """Labels with a nan, which the model itself never sees."""
    model = chain()

    def loss_of(number: int) -> Tensor:
        targets = torch.randn(4, 4)
        if number == BAD:
            targets[2, 1] = NAN
        return nn.functional.mse_loss(model(torch.randn(4, 4)), targets)

    return trained(model, loss_of)


@hostile(**OF_LOSS, cause=("overflow",), state="inf")
def a_float16_sum_overflows() -> Training:
    model = chain().half()

    def loss_of(number: int) -> Any:
        out = model(torch.randn(4, 4).half())
        return (out * 0 + 6e4).sum() if number == BAD else out.mean()

    return trained(model, loss_of)


@hostile(**OF_LOSS, cause=("invalid", "singular"))
def one_of_two_losses() -> Training:
    """Both are handed over at once."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        out = model(torch.randn(4, 4))
        second = (out.mean() - (number == BAD) * 100).sqrt() if number == BAD else out.mean()
        torch.autograd.backward((out.square().mean(), second))
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, step)


@hostile(**OF_LOSS, cause=("invalid", "singular"))
def the_second_of_two_backwards() -> Training:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        out = model(torch.randn(4, 4))
        out.square().mean().backward(retain_graph=True)
        (out.abs().mean() - (number == BAD) * 100.0).sqrt().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, step)


@hostile(**OF_LOSS, cause=("invalid", "singular"))
def a_bad_loss_under_a_scaler() -> Training:
    """No scale makes a nan: the scaler would skip the steps and say nothing."""
    model = chain()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(number: int) -> None:
        labels = torch.full((4,), -100) if number == BAD else torch.randint(4, (4,))
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(torch.randn(4, 4)), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Training(model, step)


@hostile(**OF_LOSS, cause=("overflow", "singular"), state="inf")
def an_infinite_loss_under_a_scaler() -> Training:
    """The loss is inf before it is scaled: not the scale's effect."""
    model = chain()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(number: int) -> None:
        likely = model(torch.randn(4, 4)).softmax(-1)
        scaler.scale(-(likely * (number < BAD)).log().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Training(model, step)


@hostile(**OF_LOSS, cause=("invalid", "singular"), batch=6)
def the_loss_of_a_micro_batch() -> Training:
    """Accumulated over four batches, of which the third has no label."""
    model = chain()

    def loss_of(number: int) -> Tensor:
        labels = torch.full((4,), -100) if number == 6 else torch.randint(4, (4,))
        return nn.functional.cross_entropy(model(torch.randn(4, 4)), labels)

    return trained(model, loss_of, accumulate=4)


@hostile(**OF_LOSS, cause=("invalid", "singular"), check="batch")
def a_bad_loss_read_once_a_batch() -> Training:
    return all_labels_ignored()


@hostile(**OF_LOSS, cause=("invalid", "singular"), check="async")
def a_bad_loss_read_later() -> Training:
    return all_labels_ignored()


@hostile(**OF_LOSS, cause=("invalid", "singular"), every=4)
def a_bad_loss_between_the_full_batches() -> Training:
    return all_labels_ignored()


class Pair(nn.Module):
    """A generator and a discriminator; neither this container nor the pair is ever called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = chain(), chain(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@hostile(
    module=("discriminator", "discriminator.2"),
    cause="gradient",
    state=("nan", "inf"),
    batch=range(12, 80),
    says=f"batch {2 * BAD + 1}",  # each half of a step is a batch, as no module is the root of both
    batches=80,
    gradients=True,
)
def one_of_two_scalers() -> Training:
    """The generator's loss is finite and its gradient inf, for ever: its scaler shrinks to nothing. The other one is healthy."""
    gan = Pair()
    parts = (gan.generator, gan.discriminator)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in parts]

    def step(number: int) -> None:
        for index in (1, 0):
            fake = gan.generator(torch.randn(4, 4))
            judged = gan.discriminator(fake.detach() if index else fake)
            loss = judged.square().mean()
            if number >= BAD and not index:
                loss = loss + (judged * 0).square().sum().sqrt()  # 0, with the gradient 0 * inf
            scalers[index].scale(loss).backward()
            scalers[index].step(optimizers[index])
            scalers[index].update()
            for optimizer in optimizers:
                optimizer.zero_grad()

    return Training(gan, step)


@hostile(**OF_LOSS, cause=("invalid", "singular"), batch=(BAD, 2 * BAD + 1))
def the_loss_of_a_discriminator() -> Training:
    gan = Pair()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (gan.generator, gan.discriminator)]

    def step(number: int) -> None:
        for index, optimizer in enumerate(optimizers):
            fake = gan.generator(torch.randn(4, 4))
            score = gan.discriminator(fake.detach() if index else fake)
            loss = (score.square().mean() - (number == BAD and index == 1) * 100.0).sqrt()
            loss.backward()
            optimizer.step()
            for each in optimizers:
                each.zero_grad()

    return Training(gan, step)


@hostile(**OF_LOSS, cause=("invalid", "overflow", "singular"))
def a_divergence_of_distributions() -> Training:
    """0 * log 0 in a hand-written KL divergence."""
    model = chain()

    def loss_of(number: int) -> Any:
        p = model(torch.randn(4, 4)).softmax(-1)
        if number == BAD:
            p = p * torch.tensor([1.0, 1.0, 1.0, 0.0])
        return (p * p.log()).sum()

    return trained(model, loss_of)


@hostile(**OF_LOSS, cause=("invalid", "singular"))
def a_loss_that_the_model_computes() -> Training:
    """As a transformers model does: the root's output has the loss and the logits. The root's own output is the earlier frame."""
    parts = chain()

    def forward(root: Root, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = root.net(x)
        return {"logits": logits, "scaled": nn.functional.cross_entropy(logits, labels, reduction="sum")}

    model = Root(forward, net=parts)

    def loss_of(number: int) -> Any:
        labels = torch.full((4,), -100) if number == BAD else torch.randint(4, (4,))
        return model(torch.randn(4, 4), labels)["scaled"] / (labels >= 0).sum()

    return trained(model, loss_of)
