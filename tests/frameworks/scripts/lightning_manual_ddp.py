"""Lightning's manual optimization under DDP, of a GAN: both backwards and both steps run inside of the forward of DDP.

packages: lightning
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 12, module generator.2
"""

import os
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Generator(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.discriminator = Discriminator(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.batch = -1
        self.generator[2].register_forward_pre_hook(self.spoil)

    def on_fit_start(self):
        torch.manual_seed(self.global_rank)  # each rank's noise is its own

    def forward(self, z):
        return self.generator(z)

    def spoil(self, module, given):
        if os.environ.get("FAULT") and (self.global_rank, self.batch) == (1, 6):
            return (given[0] * float("nan"),)

    def training_step(self, batch, number):
        self.batch += 1
        (real,) = batch
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        judge = nn.functional.binary_cross_entropy_with_logits
        first, second = self.optimizers()

        loss = judge(self.discriminator(self(torch.randn(len(real), 4))), ones)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        second.zero_grad()
        fake = self(torch.randn(len(real), 4)).detach()
        loss = (judge(self.discriminator(real), ones) + judge(self.discriminator(fake), zeros)) / 2
        self.manual_backward(loss)
        second.step()
        second.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.generator.parameters(), 1e-2), torch.optim.Adam(self.discriminator.parameters(), 1e-2)]


lightning.seed_everything(0)
data = DataLoader(TensorDataset(torch.randn(128, 8)), batch_size=8)
module = Module()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, data)
if trainer.global_rank == 0:
    print(trainer.global_step, sum(p.double().abs().sum().item() for p in module.parameters()).hex())
