"""What an uncaught exception ends: the process, but not an interactive Python."""

from __future__ import annotations

import subprocess
import sys

from jobs import environment

LINES = """\
from rankwatch import errors
from rankwatch.api import registry
class Watch:
    def end_by(self, error): print("ended by", error)
    def end(self): print("ended with the process")

watch = Watch()
registry.prepare(); registry.remember(watch)
raise errors.UsageError("a mistyped option")
print("it goes on:", not registry.is_process_ending())
"""


def run(*options: str, text: str) -> tuple[int, str, str]:
    command = [sys.executable, *options]
    process = subprocess.run(command, input=text, env=environment(), capture_output=True, text=True, check=False)
    return process.returncode, process.stdout, process.stderr


def test_at_a_prompt_an_error_ends_neither_python_nor_a_watch() -> None:
    code, out, err = run("-i", "-q", text=LINES)
    assert (code, out) == (0, "it goes on: True\nended with the process\n")
    assert "UsageError: a mistyped option" in err


def test_in_a_script_it_ends_both() -> None:
    code, out, _ = run("-", text=LINES)
    assert (code, out.splitlines()[0]) == (2, "ended by a mistyped option")
    assert "it goes on" not in out
