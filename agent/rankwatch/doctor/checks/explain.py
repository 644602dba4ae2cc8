"""Explains lines of NCCL's log (NCCL_DEBUG=INFO). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ..result import CheckResult, ok, warn

CHECK = "nccl log"
MOST = 20
"""Lines that are reported; the first are mostly the cause of the rest."""
LONGEST = 200


class Pattern(NamedTuple):
    """The meaning of the lines that match. A pattern with advice is a problem."""

    line: str
    meaning: str
    advice: str = ""


_OPEN_PORTS = "open all TCP ports between the nodes, or set NCCL_SOCKET_IFNAME to the interface that reaches the others"

PATTERNS = [
    Pattern(r"NCCL version \S+", "NCCL's version"),
    Pattern(r"Bootstrap ?: Using (\S+)", "the interface by which NCCL's ranks find each other"),
    Pattern(r"NCCL_\w+ set by environment to", "an option taken from the environment"),
    Pattern(r"NET/IB ?: Using ", "data goes over InfiniBand or RoCE"),
    Pattern(r"NET/Socket ?: Using ", "data between nodes goes over plain TCP"),
    Pattern(
        r"NET/IB ?: No device found",
        "NCCL sees no InfiniBand or RoCE card and takes TCP, which is far slower",
        "if the node has one: ibstat; in a container --device=/dev/infiniband and libibverbs; NCCL_IB_HCA, NCCL_IB_DISABLE",
    ),
    Pattern(
        r"Failed to open libibverbs",
        "without this library NCCL cannot use InfiniBand and takes TCP",
        "if the node has such a card: install libibverbs1 (rdma-core)",
    ),
    Pattern(
        r"[Nn]o socket interface found|No IP interface found",
        "the interface that NCCL was told to use is not there, or has no address",
        "ip -br addr on that node, then NCCL_SOCKET_IFNAME by it (or unset it)",
    ),
    Pattern(
        r"(connect|Connect) .*(Connection refused|[Cc]onnection timed out|No route to host|Network is unreachable)",
        "NCCL could not reach another rank by TCP",
        _OPEN_PORTS,
    ),
    Pattern(
        r"socketProgress: Connection closed by remote peer|Connection reset by peer",
        "another rank went away",
        "look for the rank that failed first: its own log names the cause",
    ),
    Pattern(
        r"Call to ibv_(create_cq|create_qp|reg_mr\w*) failed.*(Cannot allocate memory|-12)|Call to ibv_create_\w+ failed",
        "the InfiniBand card may not lock enough memory",
        "ulimit -l unlimited for the job (SLURM: PropagateResourceLimitsExcept=MEMLOCK; docker: --ulimit memlock=-1)",
    ),
    Pattern(
        r"Call to ibv_modify_qp failed|Got completion from peer .*(error|status=)\s?12",
        "the nodes' InfiniBand or RoCE ports do not reach each other",
        "ibstat and ibping between them; for RoCE NCCL_IB_GID_INDEX; NCCL_IB_HCA to leave a bad port out",
    ),
    Pattern(
        r"Got completion from peer",
        "an InfiniBand or RoCE transfer failed",
        "look at the other node's log and at its card's error counters (perfquery)",
    ),
    Pattern(
        r"shared memory segment|failed to extend /dev/shm|posix_fallocate failed",
        "/dev/shm is too small for NCCL",
        "docker run --shm-size=8g (or --ipc=host); remove leftovers: ls -l /dev/shm/nccl-*",
    ),
    Pattern(
        r"Duplicate GPU detected",
        "two ranks are on the same GPU",
        "torch.cuda.set_device(LOCAL_RANK); at most one rank for each GPU",
    ),
    Pattern(
        r"Cuda failure.*out of memory",
        "no GPU memory is left for NCCL's buffers",
        "nvidia-smi: end what an earlier job left, or leave NCCL more room",
    ),
    Pattern(
        r"Cuda failure.*peer access is not supported",
        "the driver claims a way between two GPUs that it does not have",
        "NCCL_P2P_DISABLE=1 to see whether that is it; update the driver",
    ),
    Pattern(r"Cuda failure", "CUDA failed below NCCL", "dmesg | grep -i xid on that node: the GPU may be broken"),
    Pattern(
        r"[Mm]ismatch.*version|[Vv]ersion mismatch|mismatch in info from procs",
        "ranks run NCCL of different versions, or belong to different jobs",
        "the same image on all nodes; another MASTER_PORT",
    ),
    Pattern(r"via P2P/", "GPUs of a node speak directly, by NVLink or PCIe"),
    Pattern(r"via SHM", "GPUs of a node speak by way of the host's memory, not directly"),
    Pattern(r"via NET/IB/\d+(/\d+)?/GDRDMA", "the network card reads the GPU's memory directly"),
    Pattern(r"via NET/IB", "data between nodes goes over InfiniBand or RoCE, by way of the host's memory"),
    Pattern(r"via NET/Socket", "data between nodes goes over plain TCP"),
    Pattern(
        r"NET/Plugin.*(No plugin found|Could not find|Plugin load)", "no network plugin: NCCL uses its own, which is fine"
    ),
]
_LOGGED = re.compile(r"NCCL (INFO|WARN) (.*)")


def explain(lines: Iterable[str]) -> list[CheckResult]:
    """The first line of each known meaning, and every unknown warning; problems first."""
    first: dict[str, CheckResult] = {}
    for line in map(str.strip, lines):
        logged = _LOGGED.search(line)
        text = (logged[2] if logged else line)[:LONGEST]
        known = next((pattern for pattern in PATTERNS if re.search(pattern.line, line)), None)
        if known is not None:
            found = f"{known.meaning}: {text}"
            first.setdefault(known.meaning, warn(CHECK, found, known.advice) if known.advice else ok(CHECK, found))
        elif logged and logged[1] == "WARN":
            first.setdefault(text, warn(CHECK, text, "look this warning up in NCCL's troubleshooting guide"))
    return sorted(first.values(), key=lambda result: not result.advice)[:MOST]
