"""Opacus: DP-SGD, with gradients of each sample; its optimizer clips them and adds noise.

packages: opacus
launch: python
truth: rank 0, batch 5, module 2
"""

import os

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(128, 8), torch.randint(0, 2, (128,)))
net, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=16),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    noise_generator=torch.Generator().manual_seed(1),
)
batch = -1
model[2].register_forward_pre_hook(
    lambda module, given: (given[0] * float("nan"),) if os.environ.get("FAULT") and batch == 5 else None
)
for _ in range(2):
    for x, y in loader:
        batch += 1
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
print(sum(p.double().abs().sum().item() for p in model.parameters()).hex())
