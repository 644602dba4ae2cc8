"""What the built site takes from elsewhere in the repository: its start page is the README, and each command prints its help."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "agent"), str(ROOT / "monitor")]

from rankwatch_monitor.cli import COMMANDS, main  # noqa: E402

EVERY_HELP = "<!-- help of every command -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri == "index.md":
        return readme()
    return markdown.replace(EVERY_HELP, "\n".join(map(_section, COMMANDS)))


def readme() -> str:
    """The README with links that hold in the site: to pages as they are there, to other files as their names."""
    text = (ROOT / "README.md").read_text().replace("](docs/pages/", "](")
    return re.sub(r"\[[^]]+\]\(([A-Z]+\.md)\)", r"`\1`", text)


def _section(command: str) -> str:
    what = COMMANDS[command]
    return f"## rankwatch {command}\n\n{what[0].upper()}{what[1:]}.\n\n```text\n{help_of(command)}```\n"


def help_of(command: str) -> str:
    """What ``rankwatch COMMAND --help`` prints on a terminal of 88 columns."""
    said = io.StringIO()
    with patch.dict(os.environ, COLUMNS="88"), redirect_stdout(said), suppress(SystemExit):
        main([command, "--help"])
    return said.getvalue()
