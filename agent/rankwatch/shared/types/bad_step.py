"""What happens when a step is bad: the run is aborted, or the step is left out, within a budget."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"skip(?:=(\d{1,6})/(\d{1,6}))?")

EXPECTED = "abort, skip, or skip=N/M: at most N steps of the last M"


@dataclass(frozen=True, slots=True)
class OnBadStep:
    """At most ``most`` steps of the last ``of`` are left out; 0: none is, and a bad step ends the run."""

    most: int = 0
    of: int = 128

    @property
    def skips(self) -> bool:
        return self.most > 0

    def __str__(self) -> str:
        return f"skip={self.most}/{self.of}" if self.skips else "abort"


ABORT = OnBadStep()

SKIP = OnBadStep(3)
"""What ``skip`` stands for. A loader meets a poisonous file once an epoch; who needs more has another fault."""


def parse(text: str) -> OnBadStep:
    """The meaning of ``abort``, ``skip`` or ``skip=3/128``.

    Raises:
        ValueError: it is none of these, or does not allow a step, or allows all steps.
    """
    found = _FORM.fullmatch(text.strip())
    if text.strip() == "abort":
        return ABORT
    if found is None:
        raise ValueError(f"expected {EXPECTED}")
    if found[1] is None:
        return SKIP
    most, of = int(found[1]), int(found[2])
    if not 0 < most < of:
        raise ValueError(f"expected {EXPECTED}, with 0 < N < M")
    return OnBadStep(most, of)
