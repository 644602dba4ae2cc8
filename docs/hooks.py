"""What the pages take from the program itself as they are built: the help of each command."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "agent"), str(ROOT / "monitor")]

from rankwatch_monitor.cli import COMMANDS, main  # noqa: E402

PLACE = "<!-- help of every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the commands where the page has a place for them."""
    return re.sub(re.escape(PLACE), lambda _: "\n".join(map(_section, COMMANDS)), markdown)


def _section(command: str) -> str:
    what = COMMANDS[command]
    return f"## rankwatch {command}\n\n{what[0].upper()}{what[1:]}.\n\n```text\n{help_of(command)}```\n"


def help_of(command: str) -> str:
    """What ``rankwatch COMMAND --help`` prints on a terminal of 88 columns."""
    os.environ["COLUMNS"] = "88"
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        main([command, "--help"])
    return said.getvalue()
