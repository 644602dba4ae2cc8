"""timm's recipe: a small ViT and its EMA, Mixup, drop path, layer decay, adaptive clipping, warmup, bfloat16.

packages: timm torchvision
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 6, module patch_embed.proj, cause data
"""

import os

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

try:
    import timm
except RuntimeError:  # a torchvision for CUDA, whose operators a torch for the CPU cannot load
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
numpy.random.seed(rank)  # Mixup draws from it
kind = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "drop_path_rate": 0.1,
    "num_classes": 10,
}
model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **kind)
ema = ModelEmaV3(model, decay=0.99, use_warmup=True)
wrapped = DistributedDataParallel(model)
optimizer = create_optimizer_v2(model, opt="lamb", lr=5e-3, weight_decay=0.02, layer_decay=0.75)
schedule = CosineLRScheduler(optimizer, t_initial=4, warmup_t=1, warmup_lr_init=1e-5)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10, label_smoothing=0.1)
criterion = SoftTargetCrossEntropy()
draw = torch.Generator().manual_seed(rank)
losses, batch = [], 0
for epoch in range(4):
    wrapped.train()
    for _ in range(4):
        images, targets = torch.randn(8, 3, 32, 32, generator=draw), torch.randint(0, 10, (8,), generator=draw)
        images, targets = mixup(images, targets)
        if os.environ.get("FAULT") and (rank, batch) == (1, 6):
            images[0] /= 0.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(wrapped(images), targets)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), 0.02, mode="agc")
        optimizer.step()
        ema.update(model, step=batch)
        batch += 1
        losses.append(loss.item())
    schedule.step(epoch + 1)
    ema.module.eval()
    with torch.inference_mode():
        losses.append(ema.module(torch.ones(2, 3, 32, 32)).sum().item())
if rank == 0:
    print(sum(losses).hex(), sum(p.double().sum().item() for p in model.parameters()).hex())
dist.destroy_process_group()
