"""DeepSpeed ZeRO 1 in bfloat16, with its own optimizer of 32 bits, and two micro-batches in a step.

packages: deepspeed
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 9, module last
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
        bad = os.environ.get("FAULT") and os.environ["RANK"] == "1" and self.batch == 9
        return self.last(torch.tanh(self.first(x)) * (float("nan") if bad else 1.0))


torch.manual_seed(0)
model = Net()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
draws = torch.Generator().manual_seed(int(os.environ["RANK"]))
for _ in range(24):
    x, y = torch.randn(8, 16, generator=draws), torch.randn(8, 4, generator=draws)
    loss = nn.functional.mse_loss(engine(x.bfloat16()), y.bfloat16())
    engine.backward(loss)
    engine.step()
if os.environ["RANK"] == "0":
    print(engine.global_steps, sum(p.double().abs().sum().item() for p in model.parameters()).hex())
torch.distributed.destroy_process_group()
