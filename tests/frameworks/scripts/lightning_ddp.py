"""Lightning's Trainer over two processes with DDP, accumulation and a validation loop, without our callback.

packages: lightning
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 6, module net.2
"""

import os
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        self.batch = -1
        self.net[2].register_forward_pre_hook(self.spoil)

    def spoil(self, module, given):
        if os.environ.get("FAULT") and self.training and (self.global_rank, self.batch) == (1, 6):
            return (given[0] * float("nan"),)

    def training_step(self, batch, number):
        self.batch += 1
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


lightning.seed_everything(0)
data = DataLoader(TensorDataset(torch.randn(128, 8), torch.randint(0, 2, (128,))), batch_size=8)
module = Module()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, accumulate_grad_batches=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, data, data)
if trainer.global_rank == 0:
    print(trainer.global_step, sum(p.double().abs().sum().item() for p in module.parameters()).hex())
