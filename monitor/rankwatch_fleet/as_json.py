"""What an archive says, for programs."""

from __future__ import annotations

from typing import Any

from rankwatch_monitor.views.jsonable import document, pick

from .chance import FORMULA, LEAST, LEVEL
from .findings import Fleet, Recurring

SCHEMA = 1


def render(fleet: Fleet) -> str:
    """As JSON text, newline at its end."""
    body = {
        "schema": SCHEMA,
        "archive": fleet.url,
        "runs": fleet.runs,
        "first_day": fleet.first_day or None,
        "last_day": fleet.last_day or None,
        "outcomes": dict(fleet.outcomes),
        "bound": {"formula": FORMULA, "level": LEVEL, "least_incidents": LEAST},
        **pick(fleet, "hosts gpus"),
        "causes": [{"cause": one.name, **_counts(one)} for one in fleet.causes],
        "modules": [{"module": one.name, "class_and_cause": one.detail, **_counts(one)} for one in fleet.modules],
        "versions": fleet.versions,
        "damaged": fleet.damaged,
    }
    return document(body)


def _counts(one: Recurring) -> dict[str, Any]:
    return pick(one, "runs jobs last_run")
