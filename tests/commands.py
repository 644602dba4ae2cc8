"""``rankwatch COMMAND``, forked from a process that has imported all commands: most commands cost less than their imports.

For tests of what a command prints and of its exit code. Tests of imports, signals and threads start ``jobs.RANKWATCH``.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from importlib import import_module

from jobs import environment

SECONDS = 240
"""A command that takes longer fails its test."""


class Server:
    """The process that commands are forked from, one at a time."""

    def __init__(self, env: dict[str, str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def run(self, arguments: tuple[str, ...], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            request = json.dumps([arguments, env]).encode()
            socket.send_fds(self._requests, [request], [out.fileno(), err.fileno()])
            code = int(self._requests.recv(64))
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

    def close(self) -> None:
        self._requests.close()
        self._process.terminate()
        self._process.wait()


@cache
def _server() -> Server:
    server = Server(environment())
    atexit.register(server.close)
    return server


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command's exit code and what it printed."""
    return _server().run(arguments, environment(**env))


def printed(*arguments: str) -> str:
    """The output of a command, which must succeed."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def serve(requests: socket.socket) -> None:
    """Forks a process for each request, and answers with its exit code; ends with the tests."""
    from rankwatch_monitor.cli import COMMANDS, main

    for name in COMMANDS:
        import_module(f"rankwatch_monitor.commands.{name}")
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not request:
            return
        child = os.fork()
        if not child:
            requests.close()
            for descriptor, standard in zip(descriptors, (1, 2), strict=True):
                os.dup2(descriptor, standard)
                os.close(descriptor)
            arguments, env = json.loads(request)
            os.environ.clear()
            os.environ.update(env)
            sys.exit(main(arguments))
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        serve(ours)
