"""Two ranks under torchrun, of which rank 1 trips; ``leaving.py HOW FOLDER``: how rank 0 saves after it caught the exception.

Before its last save, rank 0 waits until rank 1 is at its end: it stays there, or torchrun ends rank 0.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rankwatch
from rankwatch.tell import departure

HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ["RANK"])
AT_ITS_END = FOLDER / "rank 1 is at its end"
WEIGHTS = {"w": torch.ones(1000)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": self.linear(x).square().mean()}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(4) * (float("nan") if index == 41 else 1), "labels": torch.zeros(1)}


def say_when_it_stays() -> None:
    main = threading.main_thread().ident or 0
    while True:
        frame = sys._current_frames().get(main)
        while frame is not None:
            if frame.f_code is departure.stay.__code__:
                AT_ITS_END.touch()
                return
            frame = frame.f_back
        time.sleep(0.01)


def wait_for_the_other() -> None:
    while RANK == 0 and not AT_ITS_END.exists():
        time.sleep(0.01)


def save_by_torch() -> None:
    wait_for_the_other()
    with rankwatch.hold():
        torch.save(WEIGHTS, FOLDER / f"a-{RANK}.pt")


def save_two() -> None:
    with rankwatch.hold():
        torch.save(WEIGHTS, FOLDER / f"first-{RANK}.pt")
    save_by_torch()


def save_without_a_hold() -> None:
    wait_for_the_other()
    torch.save(WEIGHTS, FOLDER / f"a-{RANK}.pt")


def save_by_safetensors() -> None:
    from safetensors.torch import save_file

    wait_for_the_other()
    with rankwatch.hold():
        save_file(WEIGHTS, FOLDER / f"a-{RANK}.safetensors")


def save_distributed() -> None:
    import torch.distributed.checkpoint as dcp

    with rankwatch.hold():
        dcp.save(WEIGHTS, checkpoint_id=FOLDER / "dcp")  # type: ignore[attr-defined]
    wait_for_the_other()


def save_beside() -> None:
    import torch.distributed.checkpoint as dcp

    future: Any = dcp.async_save(WEIGHTS, checkpoint_id=FOLDER / "dcp")  # type: ignore[attr-defined]
    wait_for_the_other()
    with rankwatch.hold():
        future.result()


def train(save: Callable[[], None]) -> None:
    model = nn.Linear(4, 1)
    rankwatch.watch(model)
    try:
        for batch in range(100_000):
            model(torch.ones(2, 4) * (float("nan") if (batch, RANK) == (5, 1) else 1)).sum().backward()
    except rankwatch.TrainingAborted:
        save()
        raise


def train_in_step() -> None:
    """Rank 0 waits in an all-reduce for rank 1, and so cannot save."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    rankwatch.watch(model)
    for batch in range(100_000):
        model(torch.ones(2, 4) * (float("nan") if (batch, RANK) == (5, 1) else 1)).sum().backward()


def train_to_a_limit() -> None:
    model = nn.Linear(4, 1)
    rankwatch.watch(model, abort_after_batch_num=3)
    dist.barrier()  # both have connected
    try:
        for _ in range(10):
            model(torch.ones(2, 4)).sum().backward()
    except rankwatch.TrainingAborted:
        save_by_torch()
        raise


def train_by_transformers() -> None:
    from transformers import Trainer, TrainingArguments

    from rankwatch.integrations.transformers import RankwatchCallback

    options = {"report_to": [], "use_cpu": True, "save_strategy": "no", "ddp_backend": "gloo", "max_steps": 100}
    arguments = TrainingArguments(output_dir=str(FOLDER / "out"), per_device_train_batch_size=1, **options)
    trainer = Trainer(Net(), arguments, train_dataset=Samples(), callbacks=[RankwatchCallback()])
    try:
        trainer.train()
    except rankwatch.TrainingAborted:
        wait_for_the_other()
        with rankwatch.hold():
            trainer.save_model(str(FOLDER / "model"))
        raise


def train_by_lightning() -> None:
    import lightning.pytorch as pl

    from rankwatch.integrations.lightning import RankwatchCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.net(batch["x"] * (float("nan") if index == 20 else 1))["loss"]
            assert isinstance(loss, Tensor)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", callbacks=[RankwatchCallback()], **quiet)
    module = Module()
    try:
        trainer.fit(module, torch.utils.data.DataLoader(Samples(), batch_size=4))
    except rankwatch.TrainingAborted:
        wait_for_the_other()
        with rankwatch.hold():
            torch.save(module.state_dict(), FOLDER / f"a-{RANK}.ckpt")
        raise


SAVES = {
    "torch": save_by_torch,
    "two": save_two,
    "no-hold": save_without_a_hold,
    "safetensors": save_by_safetensors,
    "dcp": save_distributed,
    "dcp-async": save_beside,
}
TRAININGS = {
    "in-step": train_in_step,
    "limit": train_to_a_limit,
    "transformers": train_by_transformers,
    "lightning": train_by_lightning,
}

if RANK == 1:
    threading.Thread(target=say_when_it_stays, daemon=True).start()
if HOW in SAVES or HOW in ("in-step", "limit"):
    dist.init_process_group("gloo")
try:
    train(SAVES[HOW]) if HOW in SAVES else TRAININGS[HOW]()
except rankwatch.TrainingAborted:
    (FOLDER / f"rank {RANK} came through").touch()
    raise
