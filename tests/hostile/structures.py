"""The training's own structure is unusual: which call is a batch, and who calls whom."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import Calls
from trainings import Root, Scaled, Square, Training, chain, trained

from .case import BAD, NAN, fed, hostile, put


class Coder(nn.Module):
    """Its parts are called, by methods; itself never."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = chain(nn.Linear(4, 8), Scaled(), nn.Linear(8, 4))
        self.decoder = chain(nn.Linear(4, 8), Scaled(), nn.Linear(8, 4))

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out

    def decode(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(x)
        return out


@hostile(module="decoder.1", cause="overflow", state="inf")
def in_decode() -> Training:
    model = Coder()
    gain = model.decoder[1]
    return trained(
        model,
        lambda n: model.decode(model.encode(torch.randn(4, 4))).square().mean(),
        before=lambda n: setattr(gain, "gain", 1e30 if n == BAD else 1.0),
    )


@hostile(module="encoder.0", cause=("data", "upstream"), never="between modules")
def data_of_encode() -> Training:
    model = Coder()

    def loss_of(number: int) -> Tensor:
        x = torch.randn(4, 4)
        x[1, 1] = NAN if number == BAD else 0.0
        return model.decode(model.encode(x)).square().mean()

    return trained(model, loss_of)


@hostile(module="decoder.2", cause="weight")
def a_weight_of_decode() -> Training:
    model = Coder()
    return trained(
        model,
        lambda n: model.decode(model.encode(torch.randn(4, 4))).square().mean(),
        before=lambda n: put(model.decoder[2].weight, NAN, 1, 1) if n == BAD else None,
    )


@hostile(module="decoder.1", cause="gradient", gradients=True)
def a_gradient_of_decode() -> Training:
    from .backwards import Through

    model = Coder()
    model.decoder[1] = through = Through()
    return trained(
        model,
        lambda n: model.decode(model.encode(torch.randn(4, 4))).square().mean(),
        before=lambda n: setattr(through, "gain", NAN if n == BAD else 1.0),
    )


@hostile(module="", label="loss", cause=("invalid", "singular"))
def a_loss_of_decode() -> Training:
    model = Coder()

    def loss_of(number: int) -> Tensor:
        labels = torch.full((4,), -100) if number == BAD else torch.randint(4, (4,))
        return nn.functional.cross_entropy(model.decode(model.encode(torch.randn(4, 4))), labels)

    return trained(model, loss_of)


@hostile(module="1", cause="overflow", state="inf")
def trained_in_eval_mode() -> Training:
    model = chain(nn.Linear(4, 8), Square(), nn.Linear(8, 4)).eval()
    return fed(model, lambda x: x.mul_(1e30))


@hostile(module="0", cause="data")
def data_in_eval_mode() -> Training:
    return fed(chain().eval(), lambda x: put(x, NAN, 1, 1))


@hostile(module="1", cause="overflow", state="inf")
def trained_in_eval_mode_with_evaluations() -> Training:
    """A validation without gradients after each batch is no batch."""
    model = chain(nn.Linear(4, 8), Square(), nn.Linear(8, 4)).eval()
    training = fed(model, lambda x: x.mul_(1e30))

    def step(number: int) -> None:
        training.step(number)
        with torch.no_grad():
            model(torch.randn(4, 4))

    return Training(model, step)


@hostile(module="adapter", cause="overflow", state="inf")
def a_frozen_root_with_an_adapter() -> Training:
    """The backbone is frozen and in eval mode; the adapter trains."""
    scaled = Scaled()

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.lin(x) * scaled.gain * scaled.gain

    model = Root(
        lambda root, x: root.head(root.adapter(root.backbone(x))), backbone=chain(), adapter=Adapter(), head=nn.Linear(4, 4)
    )
    model.requires_grad_(False).eval()
    model.adapter.requires_grad_(True)
    return trained(
        model,
        lambda n: model(torch.randn(4, 4)).square().mean(),
        before=lambda n: setattr(scaled, "gain", 1e30 if n == BAD else 1.0),
    )


@hostile(module="0", cause="data", state="nan")
def a_head_outside_of_the_root() -> Training:
    """The watched backbone is frozen and in eval mode; only a head that is not watched trains on its features."""
    backbone, head = chain(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, 2)
    backbone.eval()
    optimizer = torch.optim.SGD([*head.parameters(), *backbone.parameters()], lr=0.01)

    def step(number: int) -> None:
        x = torch.randn(4, 4)
        x[1, 1] = NAN if number == BAD else 0.0
        head(backbone(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(backbone, step)


@hostile(module="layers.1", cause="overflow", state="inf")
def a_list_that_is_called_from_outside() -> Training:
    """The training loop itself goes through the root's layers."""
    model = Root(lambda root, x: x, layers=nn.ModuleList([nn.Linear(4, 4), Scaled(), nn.Linear(4, 4)]))

    def loss_of(number: int) -> Tensor:
        x = torch.randn(4, 4)
        for layer in model.layers:
            x = layer(x)
        return x.square().mean()

    return trained(model, loss_of, before=lambda n: setattr(model.layers[1], "gain", 1e30 if n == BAD else 1.0))


@hostile(module="1", cause="overflow", state="inf")
def under_checkpointing() -> Training:
    scaled = Scaled()

    class Whole(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    model = Whole(nn.Linear(4, 8), scaled, nn.Linear(8, 4))
    return trained(
        model,
        lambda n: model(torch.randn(4, 4)).square().mean(),
        before=lambda n: setattr(scaled, "gain", 1e30 if n == BAD else 1.0),
    )


@hostile(module="block.1", cause="overflow", state="inf")
def under_reentrant_checkpointing() -> Training:
    """In the first forward there are no gradients; the number is bad already."""
    scaled = Scaled()
    block = chain(nn.Linear(4, 8), scaled, nn.Linear(8, 4))
    parts = {"first": nn.Linear(4, 4), "block": block, "head": nn.Linear(4, 4)}
    model = Root(lambda root, x: root.head(checkpoint(root.block, root.first(x), use_reentrant=True)), **parts)
    return trained(
        model,
        lambda n: model(torch.randn(4, 4)).square().mean(),
        before=lambda n: setattr(scaled, "gain", 1e30 if n == BAD else 1.0),
    )


@hostile(module="0", cause="data")
def after_a_forward_that_raised() -> Training:
    """The loop catches an error of the model in batch 3, and goes on with the next batch: as after too little memory."""
    model = chain(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    training = fed(model, lambda x: put(x, NAN, 1, 1))

    def step(number: int) -> None:
        try:
            if number == 3:
                model(torch.randn(4, 3))
        except RuntimeError:
            return
        training.step(number)

    return Training(model, step)


@hostile(module="1", cause="overflow", state="inf", batch=(4 * BAD, BAD))
def with_a_closure() -> Training:
    """LBFGS calls the model as often as it likes: four times a step here."""
    scaled = Scaled()
    model = chain(nn.Linear(4, 8), scaled, nn.Linear(8, 4))
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


@hostile(module="1", cause="overflow", state="inf")
def with_an_evaluation_between() -> Training:
    """A validation of three forwards every two batches."""
    scaled = Scaled()
    model = chain(nn.Linear(4, 8), scaled, nn.Linear(8, 4))
    training = trained(
        model,
        lambda n: model(torch.randn(4, 4)).square().mean(),
        before=lambda n: setattr(scaled, "gain", 1e30 if n == BAD else 1.0),
    )

    def step(number: int) -> None:
        training.step(number)
        if number % 2:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(torch.randn(4, 4))
            model.train()

    return Training(model, step)


@hostile(module="twin", cause="overflow", state="inf")
def a_module_with_two_names() -> Training:
    scaled = Scaled()
    model = Root(lambda root, x: root.head(root.twin(x)), twin=scaled, again=scaled, head=nn.Linear(4, 4))
    return trained(
        model,
        lambda n: model(torch.randn(4, 4)).square().mean(),
        before=lambda n: setattr(scaled, "gain", 1e30 if n == BAD else 1.0),
    )


@hostile(module="late", cause="overflow", state="inf")
def a_module_that_is_added_later() -> Training:
    model = Root(lambda root, x: root.head(root.late(x) if hasattr(root, "late") else x), head=nn.Linear(4, 4))

    def before(number: int) -> None:
        if number == 2:
            model.late = Scaled()
        if number == BAD:
            model.late.gain = 1e30

    return trained(model, lambda n: model(torch.randn(4, 4)).square().mean(), before=before)


@hostile(module="1", cause="invalid")
def in_another_thread() -> Training:
    """The forward runs in a thread of the user's, as in torch.nn.DataParallel or a prefetcher."""
    import threading

    now = [1.0]
    model = chain(nn.Linear(4, 8), Calls(lambda x: x * now[0]), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        now[0] = NAN if number == BAD else 1.0
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
        results[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, step)
