"""Removes the detectors of each test."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import lives
from notebook import unwatch
from rankwatch.hook import hooks


@pytest.fixture(autouse=True)
def _unwatch() -> Iterator[None]:
    """A second watched model, left by a test before this one, would change whose losses are told apart."""
    for left in list(hooks._all):
        warnings.warn(f"a test before this one has left a {type(left.root).__name__} watched", stacklevel=1)
        left.remove()
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
def one_thread() -> Iterator[None]:
    """Tensors this small give threads no work to share, and on busy cores the threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No graph of one test serves another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _life(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compares what the detectors of the test tell with ``lives``, or records it."""
    item = request.node
    if not lives.is_logged(item):
        yield
        return
    log: lives.Log = []
    with pytest.MonkeyPatch.context() as patched:
        lives.watch_lives(patched, log)
        yield
    recorder = next(
        (one for one in request.config.pluginmanager.get_plugins() if type(one).__name__ == "LifeRecorder"), None
    )
    if recorder is not None:
        recorder.logs[item.nodeid] = list(log)
    elif (known := lives.recorded().get(item.nodeid)) is not None:
        assert log == known
