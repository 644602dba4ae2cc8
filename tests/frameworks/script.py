"""A script of ``scripts/``: a small training by one framework. The head of its docstring says how it is run and what is true.

    packages: skorch scikit-learn        what pip installs beside our own environment
    launch: torchrun --nproc-per-node 2  what comes before the script, as the framework's users write it
    truth: rank 1, batch 3, module a|b   the verdict where FAULT is set in the environment; ``|`` stands between alternatives

``truth`` has some of these fields: ``rank``, ``batch``, ``module`` (``-``: the root), ``cause``, ``run`` (how many watched
trainings began before), and ``notice`` (its kind; then there is no verdict). The last line that a script prints has its losses or
weights to the last bit: it must be the same bare and watched.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).parent / "scripts"
FIELDS = ("run", "rank", "batch", "module", "cause", "notice")


class Said(NamedTuple):
    """What was said of a run with the fault. ``fields``: those of ``FIELDS`` of the verdict, or none."""

    fields: dict[str, str]
    notices: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Script:
    path: Path
    what: str
    packages: tuple[str, ...]
    launch: tuple[str, ...]
    truth: dict[str, tuple[str, ...]]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def distributions(self) -> list[str]:
        """The packages without what is asked of their versions."""
        return [re.split(r"[<>=!~\[]", package)[0] for package in self.packages]

    def is_right(self, said: Said) -> bool:
        """Whether each field of the truth is as it was said."""
        asked = dict(self.truth)
        kinds = asked.pop("notice", ())
        if kinds and (said.fields or not set(kinds) & set(said.notices)):
            return False
        return all(said.fields.get(name) in values for name, values in asked.items())


def read(path: Path) -> Script:
    """Raises: ValueError: the head lacks a line, or the truth has a field of another name."""
    what, _, head = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")
    lines = dict(line.partition(": ")[::2] for line in head.splitlines() if ": " in line)
    if missing := {"packages", "launch", "truth"} - set(lines):
        raise ValueError(f"{path.name}: its docstring has no line {', '.join(sorted(missing))}")
    truth: dict[str, tuple[str, ...]] = {}
    for field in lines["truth"].split(", "):
        name, _, values = field.partition(" ")
        if name not in FIELDS:
            raise ValueError(f"{path.name}: {name!r} is no field of a truth: {', '.join(FIELDS)}")
        truth[name] = tuple("" if value == "-" else value for value in values.split("|"))
    return Script(path, what, tuple(lines["packages"].split()), tuple(lines["launch"].split()), truth)


def all_scripts() -> dict[str, Script]:
    return {path.stem: read(path) for path in sorted(SCRIPTS.glob("*.py"))}
