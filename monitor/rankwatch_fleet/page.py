"""What an archive says, as one self-contained HTML file without scripts, in the style of the page."""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib import resources

from .chance import FORMULA
from .findings import Fleet, Machines
from .text import describe_chance, describe_kinds, describe_machines, describe_version

_FILE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src {hash}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>rankwatch: {title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>Archive {title}</h1>
{body}
</main>
</body>
</html>
"""

_MOST_BY_CHANCE = 20


def render(fleet: Fleet) -> str:
    style = (resources.files("rankwatch_monitor.views.ui") / "static" / "page.css").read_text(encoding="utf-8")
    parts = [_tiles(fleet), _machines("GPU", fleet.gpus), _machines("host", fleet.hosts)]
    parts.append(f'<p class="note">{html.escape(FORMULA)}</p>')
    causes = ((one.name, one.runs, one.jobs, one.last_run) for one in fleet.causes)
    modules = ((one.name or "(root)", one.detail, one.runs, one.jobs, one.last_run) for one in fleet.modules)
    versions = (
        (describe_version(one.torch, one.driver, one.rankwatch), one.runs, one.verdicts, one.suspects)
        for one in fleet.versions
    )
    parts.append(_section("Causes", ("cause", "#runs", "#jobs", "last run"), causes))
    parts.append(_section("Modules", ("module", "class: cause", "#runs", "#jobs", "last run"), modules))
    parts.append(_section("Versions", ("versions", "#runs", "#verdicts", "#suspects"), versions))
    digest = f"'sha256-{b64encode(sha256(style.encode()).digest()).decode()}'"
    return _FILE.format(title=html.escape(fleet.url), style=style, body="\n".join(filter(None, parts)), hash=digest)


def _tiles(fleet: Fleet) -> str:
    tiles = [
        (f"{fleet.runs:,}", f"runs, {fleet.first_day} to {fleet.last_day}"),
        *((f"{count:,}", outcome) for outcome, count in fleet.outcomes.items()),
        (f"{fleet.gpus.hours:,.0f}", "GPU hours"),
        (f"{fleet.gpus.count:,}", "GPUs"),
        (f"{fleet.hosts.count:,}", "hosts"),
    ]
    body = "".join(f"<div><b>{html.escape(value)}</b><span>{html.escape(text)}</span></div>" for value, text in tiles)
    return f'<div class="tiles">{body}</div>'


def _machines(what: str, machines: Machines) -> str:
    if not machines.count:
        return ""
    head = (
        what,
        "on" if what == "GPU" else "GPUs",
        "#k incidents",
        "#expected",
        "#hours",
        "#P(X >= k)",
        "of what",
        "last run",
    )
    rows = [
        (
            one.name, one.where, one.incidents, f"{one.expected:.1f}", f"{one.hours:,.0f}", describe_chance(one.chance),
            describe_kinds(what, one), f"{one.last_run}, {one.last_day}",
        )
        for one in (*machines.standing_out, *machines.by_chance[:_MOST_BY_CHANCE])
    ]  # fmt: skip
    return _section(f"{describe_machines(what, machines)}", head, rows, bad=len(machines.standing_out))


def _section(title: str, head: Sequence[str], rows: Iterable[Sequence[object]], bad: int = 0) -> str:
    """A table; of a column whose name begins with ``#``, numbers. The first ``bad`` rows are marked."""
    kinds = [
        ' class="number"' if name.startswith("#") else ' class="name"' if not at else "" for at, name in enumerate(head)
    ]
    names = "".join(f"<th{kind}>{html.escape(name.lstrip('#'))}</th>" for kind, name in zip(kinds, head, strict=True))
    lines = []
    for number, row in enumerate(rows):
        cells = (
            f'<td{kind} data-head="{html.escape(name.lstrip("#")) if at else ""}">{html.escape(_shown(cell))}</td>'
            for at, (kind, name, cell) in enumerate(zip(kinds, head, row, strict=True))
        )
        mark = ' class="is-bad"' if number < bad else ""
        lines.append(f"<tr{mark}>{''.join(cells)}</tr>")
    table = f'<table class="stacked"><thead><tr>{names}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    shown = f'<div class="scroll">{table}</div>' if lines else ""
    return f"<h2>{html.escape(title[:1].upper() + title[1:])}</h2>{shown}"


def _shown(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
