"""A run as one self-contained HTML file, to attach to a ticket: the page's own code and style, and the run's data."""

from __future__ import annotations

import html
import json
from base64 import b64encode
from hashlib import sha256
from importlib import resources

from .pages import RunPages

_SCRIPTS = "echarts.min.js", "charts.js", "views.js", "file.js"

_FILE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="main"></main>
<script type="application/json" id="data">{data}</script>
{scripts}
</body>
</html>
"""


def render(run: RunPages) -> str:
    """The verdict, its frames, charts, notices and ranks. Raises StoreError when the record cannot be read."""
    with run.open() as record:
        overview = run.overview(record)
        try:
            modules = run.modules(record, None)
        except LookupError:  # no batch is stored
            modules = None
        culprit, curves = run.culprit(record), run.curves(record)
    data = json.dumps({"overview": overview, "modules": modules, "series": culprit, "curves": curves}, allow_nan=False)
    style, scripts = _text("page.css"), [_text(name) for name in _SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return _FILE.format(
        policy=policy,
        title=html.escape(f"rankwatch: {overview['report']['run']['id']}"),
        style=style,
        data=data.replace("<", "\\u003c"),  # so that no name in the data ends the element
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _text(name: str) -> str:
    return (resources.files(__package__) / "static" / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"
