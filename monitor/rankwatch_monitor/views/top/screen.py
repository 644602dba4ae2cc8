"""Draws the layout with rich: once, or on a terminal until q is pressed. The only file that imports rich."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Sequence

from rich import table as tables
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ...record.follow import Newest, View
from ...record.schema import StoreError
from .focus import Focus, press
from .keys import opened
from .layout import Block, Scene, Size, lay_out, settled
from .sparks import IN_ASCII
from .table import GAP, Line, TextTable

ENDLESS = 100_000
"""Rows for a view that goes to a file."""


def show_once(view: View, focus: Focus) -> None:
    """Prints a view: what fits the terminal, or without a terminal all of it."""
    console = Console(highlight=False)
    size = Size(console.width, console.height - 1 if console.is_terminal else ENDLESS)
    console.print(draw(lay_out(Scene.of(view, time.time()), focus, size, keys=False), console))


def watch(newest: Newest, focus: Focus, interval: float) -> None:
    """Shows the run, and reads it again each ``interval`` seconds, until q is pressed."""
    # Exported, COLUMNS and LINES are the size of once: rich would never look at the terminal's.
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    console = Console(highlight=False, _environ=environ)
    begun, run = focus, ""
    scene: Scene | None = None
    trouble, due = "", 0.0
    with (
        opened() as keys,
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
    ):
        while True:
            if time.monotonic() >= due:
                due = time.monotonic() + interval
                try:
                    scene, trouble = Scene.of(newest.look(), time.time()), ""
                except StoreError as error:
                    trouble = str(error)
                if scene is not None and scene.view.report.run != run:
                    focus, run = begun, scene.view.report.run
            live.update(_screen(scene, trouble, focus, console), refresh=True)
            for key in keys.wait(due - time.monotonic()):
                if key == "quit":
                    return
                if scene is not None:
                    focus = press(focus, key, scene.names(focus), is_root=len(scene.nodes) == 1)
                    focus = settled(scene, focus, Size(*console.size))


def draw(blocks: Sequence[Block], console: Console) -> RenderableType:
    """The blocks for rich, one below the other."""
    has_bars = console.encoding.lower().startswith("utf")
    return Group(
        *(
            _table(block, console.width)
            if isinstance(block, TextTable)
            else _text(block.text if has_bars else block.text.translate(IN_ASCII), block.style)
            for block in blocks
        )
    )


def _screen(scene: Scene | None, trouble: str, focus: Focus, console: Console) -> RenderableType:
    size = Size(*console.size)
    lines = textwrap.wrap(trouble if scene else f"{trouble}: waiting for it", size.width) if trouble else []
    head = [Line(text, "red" if scene else "") for text in lines]
    if scene is None:
        return draw([*head, Line(""), Line("q: quit", "dim")], console)
    return draw([*head, *lay_out(scene, focus, size._replace(height=size.height - len(head)), keys=True)], console)


def _table(block: TextTable, width: int) -> tables.Table:
    drawn = tables.Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold", width=width)
    for column, room in zip(block.columns, block.widths(width), strict=True):
        drawn.add_column(
            _text(column.name),
            justify="right" if column.right and column is not block.columns[0] else "left",
            width=room,
            no_wrap=True,
            overflow="crop",
        )
    for row in block.rows:
        drawn.add_row(*map(_text, row.cells), style=row.style)
    return drawn


def _text(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="crop")  # never as markup: names have brackets
