"""Forks the ranks of many jobs from one process that has imported torch: ``nursery.py SOCKET MODULE...`` imports the modules too.

Each request on the socket is one job of ``forked.py``, as ``born.py`` hands it over; the answer is its process id, and later its
exit code. Prints a line once it listens; ends when its standard input does.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from e2e.scripts import forked


def become(request: bytes, descriptors: list[int]) -> None:
    order = json.loads(request)
    os.setsid()
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["folder"])
    os.memfd_create(order["env"].get("TEST_JOB_MARKER", ""), 0)  # no process of the job was started with its environment
    sys.argv[:] = [forked.__file__, *order["arguments"]]
    os._exit(forked.main())


def answer(connection: socket.socket, child: int) -> None:
    with connection:
        connection.sendall(b"%d\n" % child)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def main() -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        for name in sys.argv[2:]:
            import_module(name)
        gc.freeze()
        door.listen()
        print("listens", flush=True)
        while sys.stdin not in select.select([door, sys.stdin], [], [])[0]:
            connection, _ = door.accept()
            request, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
            child = os.fork()
            if not child:
                connection.close()
                door.close()
                become(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            threading.Thread(target=answer, args=[connection, child]).start()


if __name__ == "__main__":
    main()
