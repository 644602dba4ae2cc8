"""Real terminals: tmux shows how a screen looks, a pseudo terminal receives each byte."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from collectors import PATIENCE, until
from jobs import environment


class Tmux:
    """A terminal that runs a command and then prints ``ended CODE``."""

    def __init__(self, command: Sequence[str], *, width: int = 80, height: int = 24, **env: str) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("there is no tmux to look into a terminal with")
        self._folder = tempfile.TemporaryDirectory(prefix="tmux-")  # a socket's path must be short
        self._env = environment(**env, TMUX_TMPDIR=self._folder.name, LC_ALL="C.UTF-8")
        self._env.pop("TMUX", None)
        wrapped = f"{shlex.join(command)}; echo ended $?; stty -a; exec cat"
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), wrapped)

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def await_text(self, text: str) -> str:
        """The screen, once ``text`` is on it."""
        screen = ""

        def is_shown() -> bool:
            nonlocal screen
            screen = self.screen()
            return text in screen

        until(is_shown)
        return screen

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def close(self) -> None:
        self._tmux("kill-server")
        self._folder.cleanup()

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", *arguments], env=self._env, capture_output=True, text=True, check=True, timeout=PATIENCE
        )
        return done.stdout


class Pty:
    """A command on a pseudo terminal of 80 x 24. ``seen``: all bytes that it printed."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._ours, self._its = pty.openpty()
        fcntl.ioctl(self._its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = self.attributes()
        self.seen = b""
        ends = {"stdin": self._its, "stdout": self._its, "stderr": self._its}
        self.process = subprocess.Popen(  # type: ignore[call-overload]
            command, env={**env, "TERM": "xterm-256color"}, start_new_session=True, preexec_fn=_as_on_a_terminal, **ends
        )

    def attributes(self) -> list[Any]:
        """The terminal's settings: whether it echoes, and so on."""
        return termios.tcgetattr(self._its)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def await_bytes(self, text: bytes) -> None:
        while text not in self.seen:
            if not self._read(PATIENCE):
                raise AssertionError(f"{text!r} never came: {self.seen!r}")

    def end(self) -> int:
        """Waits for the end of the command and reads the rest of its output; returns the exit code."""
        while self.process.poll() is None:
            self._read(0.05)
        while self._read(0):
            pass
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._its)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        self.seen += os.read(self._ours, 65536)
        return True


def _as_on_a_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell makes its background processes ignore SIGINT
