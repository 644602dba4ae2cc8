"""The Hugging Face Trainer under DDP: a tiny GPT-2, accumulation, label smoothing, bfloat16, evaluation, checkpoints kept.

packages: transformers accelerate
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 4, module transformer.drop, cause data
"""

import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
rank, batches = int(os.environ["RANK"]), 0
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)


class Words(Dataset):
    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


class Planting(Trainer):
    """As users override ``compute_loss``: they hand the model embeddings of their own."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        global batches
        embedded = self.accelerator.unwrap_model(model).transformer.wte(inputs.pop("input_ids"))
        if model.training:
            if os.environ.get("FAULT") and (rank, batches) == (1, 4):
                embedded = embedded * float("nan")
            batches += 1
        return super().compute_loss(model, inputs | {"inputs_embeds": embedded}, return_outputs, **kwargs)


arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=5,
    eval_strategy="steps",
    eval_steps=2,
    save_steps=2,
    logging_steps=1,
    bf16=True,
    label_smoothing_factor=0.1,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = Planting(model, arguments, train_dataset=Words(96), eval_dataset=Words(16))
trainer.train()
if rank == 0:
    losses = [log[key] for log in trainer.state.log_history for key in ("loss", "eval_loss") if key in log]
    print(losses, sum(p.double().sum().item() for p in model.parameters()).hex())
