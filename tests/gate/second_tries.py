"""A second try that is told: which failures are tried again, and the file that remembers them.

A failure is another's where the change cannot have made it. At most ``MOST`` such failures are run again, alone. What passes
then does not make the gate red; its last lines name it, and ``tests/second-tries.md`` keeps it until somebody mends it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from .choice import areas_of, file_of
from .results import Failure

MOST = 3
"""More failures at once have one cause, and it is seldom the machine."""
THIRD = 3
"""So many entries of one test are a failure of their own."""


def may_be_tried_again(failures: Sequence[Failure], changed: Sequence[str]) -> bool:
    files = {file_of(failure.test).removeprefix("tests/") for failure in failures}
    return len(failures) <= MOST and not areas_of(changed, files) and all("::" in failure.test for failure in failures)


def entry(failure: Failure, today: date) -> str:
    """A row of the table in ``tests/second-tries.md``."""
    error = failure.error.replace("|", "\\|").replace("`", "'")
    return f"| {today} | `{failure.test}` | {error} |"


def too_often(text: str) -> list[str]:
    """The tests that stand in the file ``THIRD`` times."""
    tests = Counter(re.findall(r"^\| [\d-]+ \| `(.*?)` \|", text, re.MULTILINE))
    return [test for test, times in tests.items() if times >= THIRD]


def remember(file: Path, rows: Sequence[str]) -> None:
    with file.open("a") as opened:
        opened.writelines(f"{row}\n" for row in rows)
