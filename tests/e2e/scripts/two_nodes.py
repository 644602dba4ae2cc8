"""Starts ``train.py`` as a job of two nodes with two ranks each, both on this machine; exits like the first to fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from ports import free_port


def main() -> int:
    port = free_port()
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
