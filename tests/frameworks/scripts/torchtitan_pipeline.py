"""torchtitan's Trainer: a tiny Llama in two stages of 1F1B, each sharded by FSDP2, with selective checkpointing and a DCP save.

packages: torchtitan==0.2.2 torchdata datasets tokenizers tyro tensorboard einops pillow
launch: torchrun --nproc-per-node 4
truth: rank 3, batch 8, module layers.2.feed_forward
"""

import hashlib
import os
from dataclasses import replace
from unittest.mock import MagicMock, patch

import torch
from torch.distributed.fsdp import FSDPModule

rank, os.environ["LOCAL_RANK"] = int(os.environ["RANK"]), "0"  # torchtitan does not know that all have the same CPU

CPU = MagicMock(current_device=lambda: 0, get_device_name=lambda _: "CPU", memory_stats=lambda _: {})
CPU.get_device_properties.return_value.total_memory = 1 << 30
with patch.multiple("torch._utils", _get_available_device_type=lambda: "cpu", _get_device_module=lambda _: CPU):
    from torchtitan.tools import utils  # noqa: F401

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.protocols.train_spec import register_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402


class Words(torch.utils.data.IterableDataset):
    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        random = torch.Generator().manual_seed(self.seed)
        while True:
            words = torch.randint(0, 64, (17,), generator=random)
            yield {"input": words[:-1]}, words[1:]


def loader(dp_world_size, dp_rank, tokenizer, job_config):
    return ParallelAwareDataloader(Words(dp_rank), dp_rank, dp_world_size, batch_size=job_config.training.local_batch_size)


tiny = llama3.TransformerModelArgs(dim=16, n_layers=4, n_heads=2, vocab_size=64, rope_theta=10000)
spec = replace(llama3.get_train_spec(), model_args={"tiny": tiny}, build_dataloader_fn=loader, build_tokenizer_fn=None)
register_train_spec("tiny", spec)

config = JobConfig()
config.model.name, config.model.flavor, config.model.hf_assets_path = "tiny", "tiny", "."
config.training.local_batch_size, config.training.seq_len, config.training.steps = 4, 16, 6
config.parallelism.pipeline_parallel_degree = config.parallelism.data_parallel_shard_degree = 2
config.parallelism.pipeline_parallel_schedule = "1F1B"
config.activation_checkpoint.mode = "selective"
config.checkpoint.enable, config.checkpoint.interval, config.debug.seed = True, 3, 0


trainer = Trainer(config)
(part,) = trainer.model_parts
for module in part.modules():
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def plant(module, args, output):
    return output * float("nan") if os.environ.get("FAULT") and trainer.step == 3 else output


if rank == 3:  # of the second stage
    next(module for name, module in part.named_modules() if name.endswith("feed_forward")).register_forward_hook(plant)
trainer.train()
trainer.close()
digest = hashlib.sha256(b"".join(value.to_local().detach().numpy().tobytes() for value in part.parameters()))
every = [None] * 4
torch.distributed.all_gather_object(every, digest.hexdigest()[:16])
torch.distributed.destroy_process_group()
if rank == 0:
    print(" ".join(every))
