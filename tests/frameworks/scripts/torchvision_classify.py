"""torchvision's classification recipe: DDP, MixUp and CutMix, label smoothing, warmup then cosine, bfloat16 amp, EMA, evaluation.

packages: torchvision
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 5, module conv1, cause data
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

try:
    import torchvision
except RuntimeError:  # a build for CUDA, whose operators a torch for the CPU cannot load
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision
from torchvision.transforms import v2

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.rand(64, 3, 40, 40), torch.randint(0, 10, (64,)))
mix = v2.RandomChoice([v2.MixUp(num_classes=10), v2.CutMix(num_classes=10)])
augment = v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip()])
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler, collate_fn=lambda samples: mix(*default_collate(samples)))
model = torchvision.models.resnet18(num_classes=10)
network = DistributedDataParallel(model)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=1)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[1])
losses = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    network.train()
    for number, (images, targets) in enumerate(loader):
        images = augment(images)
        if os.environ.get("FAULT") and (rank, epoch, number) == (1, 1, 1):
            images[2, 1] = float("inf")
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(network(images), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        ema.update_parameters(model)
        losses.append(loss.item())
    schedule.step()
    for judged in (model, ema):
        judged.eval()
        with torch.inference_mode():
            losses.append(criterion(judged(augment(data[:8][0])), data[:8][1]).item())
if rank == 0:
    print(sum(losses).hex(), sum(p.double().sum().item() for p in ema.parameters()).hex())
dist.destroy_process_group()
