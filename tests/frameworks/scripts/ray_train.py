"""Ray Train: two workers that Ray starts, which prepare model and loader by its helpers and report metrics and checkpoints.

packages: ray[train]
launch: python
truth: rank 1, batch 5, module 0, cause data
"""

import os
import tempfile

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(config: dict) -> None:
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,))), 8)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    total, batch = 0.0, 0
    for epoch in range(3):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            if config["fault"] and (rank, batch) == (1, 5):
                x[0, 0] = float("nan")
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, batch = total + loss.item(), batch + 1
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
            ray.train.report({"total": total.hex()}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
config = {"lr": 1e-2, "fault": bool(os.environ.get("FAULT"))}
where = RunConfig(storage_path=os.path.abspath("storage"), name="run")
result = TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2), run_config=where).fit()
print(result.metrics["total"])
