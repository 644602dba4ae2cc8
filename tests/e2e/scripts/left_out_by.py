"""``left_out_by.py accelerate|gan|lightning|trainer``: trains twice, under ``skip`` and without the bad batch.

Each process prints whether the weights and the state of the optimizers are the same, and how many steps were left out. Of the
processes of torchrun the last one has the bad batch. Without it, each has one batch less.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import rankwatch

RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
BATCHES, BAD = 6, 3
"""Of each rank."""
OPTIONS: dict[str, Any] = {"on_bad_step": "skip", "capsule": "off", "closeup": 0.5}


def batches(*, skips: bool) -> list[Tensor]:
    """Of all ranks: those of one step stand side by side."""
    torch.manual_seed(1)
    made = list(torch.randn(BATCHES * RANKS, 4, 3))
    if skips:
        made[BAD * RANKS + RANKS - 1][1, 0] = float("nan")
    else:
        del made[BAD * RANKS : (BAD + 1) * RANKS]
    return made


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def accelerate(*, skips: bool) -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model_of()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    watch = rankwatch.watch(model, **OPTIONS) if skips else None
    for x in batches(skips=skips)[RANK::RANKS]:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - 1).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return [net, optimizer.optimizer]


def gan(*, skips: bool) -> list[Any]:
    """The real batch is bad: the step of the critic is left out, that of the generator is not."""
    generator, critic = model_of(), model_of()
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    watches = [rankwatch.watch(one, **OPTIONS) for one in (generator, critic)] if skips else []
    torch.manual_seed(1)
    for number, x in enumerate(torch.randn(BATCHES, 4, 3)):
        fake = generator(x.flip(0))
        if skips or number != BAD:
            real = x * float("nan") if skips and number == BAD else x
            of_critic.zero_grad()
            (critic(fake.detach()).mean() - critic(real).mean()).backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        of_generator.step()
    for watch in watches:
        watch.close()
    return [generator, critic, of_generator, of_critic]


def lightning(*, skips: bool) -> list[Any]:
    import lightning as L

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of()

        def training_step(self, x: Tensor, index: int) -> Tensor:
            found: Tensor = (self.net(x) - 1).square().mean()
            return found

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Module()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto", use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    watch = rankwatch.watch(module, **OPTIONS) if skips else None
    loader: Any = DataLoader(batches(skips=skips)[RANK::RANKS], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    if watch is not None:
        watch.close()
    return [module, trainer.optimizers[0]]


def trainer(*, skips: bool) -> list[Any]:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.net(x) - 1).square().mean()}

    model = Model()
    rows = [{"x": row} for batch in batches(skips=skips) for row in batch]
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4, num_train_epochs=1, lr_scheduler_type="constant", report_to=[],
        use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    made = Trainer(model, arguments, train_dataset=rows)
    watch = rankwatch.watch(model, **OPTIONS) if skips else None
    made.train()
    if watch is not None:
        watch.close()
    return [model, made.optimizer.optimizer]


def bits_of(things: list[Any]) -> list[bytes]:
    tensors: list[Tensor] = []
    for thing in things:
        states = thing.state.values() if isinstance(thing, torch.optim.Optimizer) else [thing.state_dict()]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [value.detach().contiguous().view(-1).numpy().tobytes() for value in tensors]


class Said(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "was left out" in record.getMessage()


def main() -> None:
    warnings.simplefilter("ignore")
    train: Callable[..., list[Any]] = {"accelerate": accelerate, "gan": gan, "lightning": lightning, "trainer": trainer}[
        sys.argv[1]
    ]
    said = Said()
    logging.getLogger("rankwatch").addHandler(said)
    same = bits_of(train(skips=False)) == bits_of(train(skips=True))
    print(f"same: {same}, left out: {said.count}", flush=True)


if __name__ == "__main__":
    main()
