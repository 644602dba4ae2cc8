"""Has its job forked by a nursery, ``born.py SOCKET RANKS SCRIPT ...``, and exits as the job does."""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX) as nursery:
    nursery.connect(sys.argv[1])
    request = json.dumps({"arguments": sys.argv[2:], "env": dict(os.environ), "folder": os.getcwd()}).encode()
    socket.send_fds(nursery, [request], [1, 2])
    with nursery.makefile() as answers:
        job = int(answers.readline())
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(job, signal.SIGTERM))
        sys.exit(abs(int(answers.readline())))
