"""DeepSpeed ZeRO 2, whose engine skips the step of a nan gradient, and goes on.

packages: deepspeed
launch: torchrun --nproc-per-node 2
truth: notice skipped_step
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.batch = -1

    def forward(self, x):
        self.batch += 1
        hidden = torch.tanh(self.first(x))
        if os.environ.get("FAULT") and os.environ["RANK"] == "1" and self.batch == 12:
            hidden.register_hook(lambda gradient: gradient * float("nan"))
        return self.last(hidden)


torch.manual_seed(0)
model = Net()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
draws = torch.Generator().manual_seed(int(os.environ["RANK"]))
for _ in range(24):
    x, y = torch.randn(8, 16, generator=draws), torch.randn(8, 4, generator=draws)
    loss = nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
if os.environ["RANK"] == "0":
    print(engine.global_steps, sum(p.double().abs().sum().item() for p in model.parameters()).hex())
torch.distributed.destroy_process_group()
