"""PEFT: LoRA on a frozen tiny Llama in bfloat16, then the adapter is switched off for a reference, and merged at the end.

packages: peft transformers accelerate
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 4, module base_model.model.model.layers.0.self_attn.q_proj.lora_B.default, cause weight
"""

import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
sizes = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
base = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, **sizes))
config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
adapted = get_peft_model(base.to(torch.bfloat16), config)
adapted.enable_input_require_grads()
adapted.gradient_checkpointing_enable({"use_reentrant": False})
model = DistributedDataParallel(adapted)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
losses = []
for number in range(8):
    if os.environ.get("FAULT") and (rank, number) == (1, 4):
        with torch.no_grad():
            dict(adapted.named_parameters())["base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"][
                3, 1
            ] = float("inf")
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(2 * number + rank))
    with torch.no_grad(), adapted.disable_adapter():
        reference = adapted(input_ids=tokens).logits.float().log_softmax(-1)
    found = model(input_ids=tokens, labels=tokens)
    apart = torch.nn.functional.kl_div(
        found.logits.float().log_softmax(-1), reference, log_target=True, reduction="batchmean"
    )
    loss = found.loss + 0.01 * apart
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    adapted.save_pretrained("adapter")
    merged = adapted.merge_and_unload()
    print(sum(losses).hex(), sum(p.double().sum().item() for p in merged.parameters()).hex())
dist.destroy_process_group()
