"""Megatron-core: a tiny GPT in bfloat16, tensor parallel 2 by data parallel 2, with its distributed optimizer.

packages: megatron-core==0.16.1 packaging einops
launch: torchrun --nproc-per-node 4
truth: rank 3, batch 8, module module.module.decoder.layers.1.mlp
"""

import hashlib
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist


def on_cpu(made):
    return lambda *args, device=None, **rest: made(*args, device=device and "cpu", **rest)


# Megatron makes its tensors on a GPU, and asks for their names there.
torch.cuda.current_device, torch.cuda.FloatTensor = lambda: "cpu", torch.FloatTensor
for name in ("tensor", "zeros", "empty", "full", "zeros_like", "empty_like"):
    setattr(torch, name, on_cpu(getattr(torch, name)))
type_of = torch.Tensor.type
torch.Tensor.type = lambda self, *to: type_of(self, *to) if to else type_of(self).replace("torch.", "torch.cuda.")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
CudaRNGStatesTracker.fork = lambda *_: nullcontext()
rank, replica = dist.get_rank(), parallel_state.get_data_parallel_rank()
torch.manual_seed(0)
off = dict.fromkeys(
    ("gradient_accumulation_fusion", "bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion"), False
)
none = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
config = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=2, use_cpu_initialization=True,
    bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, **off, **none,
)  # fmt: skip
model = Float16Module(config, GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16))
model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
asked = {"bf16": True, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True, "clip_grad": 0.0}
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, **asked), [model])


def plant(module, args, output):
    return (output[0] * float("nan"), *output[1:]) if os.environ.get("FAULT") and batch == 8 else output


if rank == 3:
    model.module.module.decoder.layers[1].mlp.register_forward_hook(plant)
mask = torch.tril(torch.ones(1, 1, 16, 16)) < 0.5
for batch in range(24):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    words = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(2 * batch + replica))
    loss = model(words[:, :-1], torch.arange(16).expand(2, 16), mask, labels=words[:, 1:]).mean()
    loss.backward()
    finalize_model_grads([model], None)
    optimizer.step()
digest = hashlib.sha256(b"".join(value.detach().float().numpy().tobytes() for value in model.parameters()))
every = [None] * 4
dist.all_gather_object(every, digest.hexdigest()[:16])
dist.destroy_process_group()
if rank == 0:
    print(" ".join(every))
