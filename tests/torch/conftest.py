"""Removes the detectors of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from notebook import unwatch


@pytest.fixture(autouse=True)
def _unwatch() -> Iterator[None]:
    yield
    unwatch()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    unwatch()
    dist.destroy_process_group()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No graph of one test serves another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
