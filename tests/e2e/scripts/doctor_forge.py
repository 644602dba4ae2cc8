"""Forks ranks that run the doctor, each on a host that the test chooses. torch is imported only once.

A line on the standard input starts a rank: ``{"host": the file of a network namespace or "", "env", "options", "out", "errors":
paths, "jump": seconds by which its clock is wrong, "deaf": whether it connects and then hangs}``. A blank line ends a job:
the answer is the exit codes; deaf ranks are killed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from typing import Any

import torch

from rankwatch.doctor import run
from rankwatch.doctor.__main__ import main

CLONE_NEWNET = 0x40000000


def become_rank(order: dict[str, Any]) -> None:
    if order["host"]:
        with open(order["host"]) as space:
            assert ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET) == 0
    for descriptor, path in ((1, order["out"]), (2, order["errors"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.environ.update(order["env"])
    if order["jump"]:
        true_time = time.time
        time.time = lambda: true_time() + order["jump"]
    if order["deaf"]:
        run.follow = lambda *arguments: signal.pause()  # type: ignore[assignment]
        run.Leader.examine = lambda leader: signal.pause()  # type: ignore[assignment, method-assign, return-value]
    code = main(order["options"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    ranks: dict[int, bool] = {}
    with os.fdopen(os.dup(1), "w") as answers:
        for line in sys.stdin:
            if line.strip():
                order = json.loads(line)
                child = os.fork()
                if child == 0:
                    become_rank(order)
                ranks[child] = order["deaf"]
                continue
            codes = [None if deaf else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, deaf in ranks.items()]
            for child in (child for child, deaf in ranks.items() if deaf):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            ranks.clear()
            answers.write(json.dumps(codes) + "\n")
            answers.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()
    serve()
