"""transformers' T5, tiny and random, under FullyShardedDataParallel with a unit for each block.

packages: transformers
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 5, module decoder.block.1.layer.2.DenseReluDense.wo|decoder.block.1.layer.2.DenseReluDense
"""

import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

dist.init_process_group("gloo")
rank, batch = dist.get_rank(), -1
torch.manual_seed(0)
config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config)


def spoil(module, given):
    if os.environ.get("FAULT") and (rank, batch) == (1, 5):
        return (given[0] * float("nan"),)


model.decoder.block[1].layer[2].DenseReluDense.wo.register_forward_pre_hook(spoil)
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
net = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
draws = torch.Generator().manual_seed(rank)
for batch in range(12):  # noqa: B007  the hook reads it
    ids, labels = (torch.randint(1, 64, (4, 12), generator=draws) for _ in range(2))
    loss = net(input_ids=ids, labels=labels).loss
    loss.backward()
    net.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(loss.item().hex())
dist.destroy_process_group()
