"""The end of a rank by force, where aborting its process groups ends the process by itself (pytorch#192105)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jobs import environment
from rankwatch.errors import EXIT_ABORTED

ENDED = """
import ctypes, faulthandler, sys, threading
import torch.distributed as dist
from rankwatch.tell.deadline import Deadline

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if "faulthandler" in sys.argv:
    faulthandler.enable()
dist.distributed_c10d._abort_process_group = ctypes.{abort}(None).abort
Deadline("rank 1 tripped", 0.01).start()
threading.Event().wait()  # until it is ended
"""


@pytest.mark.parametrize("arguments", [[], ["faulthandler"]], ids=str)
@pytest.mark.parametrize("abort", ["CDLL", "PyDLL"], ids=["without the GIL", "with the GIL"])
def test_a_rank_whose_process_groups_call_abort_ends_with_our_exit_code(abort: str, arguments: list[str]) -> None:
    command = [sys.executable, "-c", ENDED.format(abort=abort), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_ABORTED, done.stderr
    assert "rank 1 tripped; this rank did not come back" in done.stderr
