"""A CTC recipe as torchaudio's: log-mel features, convolutions and an LSTM, CTCLoss with lengths, ragged batches in DDP.

packages: torch
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 5, module -, cause singular|overflow|invalid
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Acoustic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(20, 32, 3, stride=2, padding=1), nn.ReLU())
        self.lstm, self.out = nn.LSTM(32, 24, bidirectional=True, batch_first=True), nn.Linear(48, 12)

    def forward(self, waves, lengths):
        frames = torch.stft(waves, 38, 10, window=torch.hann_window(38), return_complex=True).abs().square()
        hidden = self.conv((frames + 1e-6).log())
        lengths = (lengths // 10 + 1 + 1) // 2
        packed = nn.utils.rnn.pack_padded_sequence(hidden.mT, lengths, batch_first=True, enforce_sorted=False)
        unpacked, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(unpacked).log_softmax(-1).transpose(0, 1), lengths


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = DistributedDataParallel(Acoustic())
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
draws = torch.Generator().manual_seed(rank)
for batch in range(16):
    lengths = torch.randint(200, 400, (4,), generator=draws)
    labels = torch.randint(1, 12, (4, 6), generator=draws)
    count = torch.full((4,), 6)
    bad = os.environ.get("FAULT") and (rank, batch) == (1, 5)
    lengths[2] = 50 if bad else lengths[2]  # 3 frames for 6 labels: there is no alignment
    waves = torch.randn(4, int(lengths.max()), generator=draws)
    scores, frames = net(waves, lengths)
    loss = nn.functional.ctc_loss(scores, labels, frames, count, zero_infinity=not bad)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()
if rank == 0:
    print(sum(p.double().abs().sum().item() for p in net.parameters()).hex())
dist.destroy_process_group()
