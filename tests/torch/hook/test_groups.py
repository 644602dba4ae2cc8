"""DDP over a process group that is not torch's default one, which need not exist: torchft's replica groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from notebook import unwatch, watched


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_group_of_its_own(is_hooked: bool) -> None:
    assert not dist.is_initialized()
    made: Any = dist
    group = made.ProcessGroup(0, 1)
    gloo = made.ProcessGroupGloo(made.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net = DistributedDataParallel(model, process_group=group)
    if is_hooked:
        net.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer()))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    detector, notebook = watched(net, gradients=True)
    for _ in range(3):
        net(torch.rand(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    unwatch()
    assert detector.fault == ""
    assert {summary.batch for _, summary in notebook.batches} == {0, 1, 2}


def _done(values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(values)
    return future
