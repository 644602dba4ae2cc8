"""Accelerate: gradient accumulation, clipping, a scheduler, gathered metrics, a state that is saved and loaded.

packages: accelerate
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 5, module net.2, cause overflow
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)


class Square(nn.Module):
    def forward(self, x):
        return x * x.abs()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Square(), nn.BatchNorm1d(16), nn.Linear(16, 2))

    def forward(self, x, labels):
        logits = self.net(x)
        return nn.functional.cross_entropy(logits, labels), logits


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
data = torch.utils.data.TensorDataset(torch.randn(60, 8), torch.randint(0, 2, (60,)))
loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
if os.environ.get("FAULT") and accelerator.process_index == 1:
    calls = iter(range(1000))
    hook = lambda module, args: (args[0] * 1e30,) if next(calls) == 5 else None  # noqa: E731
    accelerator.unwrap_model(model).net[2].register_forward_pre_hook(hook)
losses = []
for epoch in range(2):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss, _ = model(x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    model.eval()
    with torch.no_grad():
        right = [accelerator.gather_for_metrics(model(x, y)[1].argmax(1) == y) for x, y in loader]
    losses.append(torch.cat(right).float().mean().item())
    accelerator.save_state(f"state-{epoch}")
    accelerator.wait_for_everyone()
    accelerator.load_state(f"state-{epoch}")
accelerator.print(sum(losses).hex(), sum(p.double().sum().item() for p in model.parameters()).hex())
accelerator.end_training()
