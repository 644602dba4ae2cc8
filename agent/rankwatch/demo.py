"""A training that overflows: two ranks, a tiny T5-like decoder in float16, and one planted bug.

``rankwatch demo`` starts it under a collector. Without one: ``torchrun --standalone --nproc-per-node 2 -m rankwatch.demo``.

The model learns to predict the next byte of a text that ships with Python. Each rank reads its own lines, and every
feed-forward layer gets their line numbers as a second input.

**The bug**: the line numbers are not normalized. They are 0 to 959 and are added after the layer norm, so nothing scales
them down. Both factors of the gated product ``gelu(wi_0 x) * (wi_1 x)`` grow with the line number, so the product grows
with its square. Rank 0 reads from line 0 and stays far below the limit. Rank 1 starts at line 480, where the product is
already large and grows by about 5% per batch. The dropout after the product scales the elements that it does not drop by
1 / 0.9, which is more than 5%: in one batch the product is still below float16's largest number, 65504, and the dropout's
output is above it. No code sets an inf: with ``--dtype float32`` or ``bfloat16`` the same training runs to its end.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import rankwatch

LINES_PER_RANK, BATCH_LINES, LINE_BYTES = 480, 8, 64
VOCABULARY, PADDING = 128, 0
WIDTH, HEADS, FF_WIDTH, BLOCKS, DROPOUT = 64, 4, 128, 2, 0.1


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (each(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = q @ k.mT
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class DenseGatedGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(WIDTH, FF_WIDTH, bias=False)
        self.wi_1 = nn.Linear(WIDTH, FF_WIDTH, bias=False)
        self.wo = nn.Linear(FF_WIDTH, WIDTH, bias=False)
        self.act = nn.GELU(approximate="tanh")
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor) -> Tensor:
        gated = self.act(self.wi_0(hidden)) * self.wi_1(hidden)
        out: Tensor = self.wo(self.dropout(gated))
        return out


class LayerSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.SelfAttention = SelfAttention()
        self.layer_norm = nn.RMSNorm(WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.dropout(self.SelfAttention(self.layer_norm(hidden)))
        return out


class LayerFF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.DenseReluDense = DenseGatedGelu()
        self.layer_norm = nn.RMSNorm(WIDTH)
        self.line_number = nn.Linear(1, WIDTH, bias=False)
        nn.init.normal_(self.line_number.weight, std=0.25)  # large enough to overflow in some 25 batches
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor, line_numbers: Tensor) -> Tensor:
        normed = self.layer_norm(hidden) + self.line_number(line_numbers)  # the bug
        out: Tensor = hidden + self.dropout(self.DenseReluDense(normed))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([LayerSelfAttention(), LayerFF()])

    def forward(self, hidden: Tensor, line_numbers: Tensor) -> Tensor:
        out: Tensor = self.layer[1](self.layer[0](hidden), line_numbers)
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.final_layer_norm = nn.RMSNorm(WIDTH)

    def forward(self, hidden: Tensor, line_numbers: Tensor) -> Tensor:
        for block in self.block:
            hidden = block(hidden, line_numbers)
        out: Tensor = self.final_layer_norm(hidden)
        return out


class TinyT5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = Decoder()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, line_numbers: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.decoder(self.shared(input_ids), line_numbers))
        return out


def read_batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's batches: the bytes of its lines, (lines, bytes), and the lines' numbers, (lines, 1, 1)."""
    lines = [line.strip() for name in sorted(topics) for line in topics[name].splitlines() if line.strip()]
    first = rank * LINES_PER_RANK
    for start in range(first, first + LINES_PER_RANK, BATCH_LINES):
        ids = torch.stack([encode(line) for line in lines[start : start + BATCH_LINES]])
        yield ids, torch.arange(start, start + BATCH_LINES, dtype=torch.float32).view(-1, 1, 1)


def encode(line: str) -> Tensor:
    return torch.tensor(list(line.encode("ascii", "replace")[:LINE_BYTES].ljust(LINE_BYTES, bytes([PADDING]))))


def train(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    torch.manual_seed(20)
    model = DistributedDataParallel(TinyT5())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with rankwatch.watch(model):
        for batch, (ids, line_numbers) in enumerate(read_batches(rank)):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
                logits = model(ids[:, :-1], line_numbers)
            loss = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PADDING)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and batch % 4 == 0:
                print(f"batch {batch:2}: loss {loss.item():.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A training of two ranks that overflows on rank 1.")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    dtype = getattr(torch, parser.parse_args().dtype)
    dist.init_process_group("gloo")
    train(dtype)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
