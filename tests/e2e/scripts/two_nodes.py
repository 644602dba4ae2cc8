"""Starts ``train.py`` as a job of two nodes with two ranks each, both on this machine; exits like the first to fail."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path


def main() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
                *("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)),
                *(str(Path(__file__).parent / "train.py"), *sys.argv[1:]),
            ]
        )
        for node in range(2)
    ]
    return max(node.wait() for node in nodes)


if __name__ == "__main__":
    sys.exit(main())
