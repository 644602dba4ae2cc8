"""What an archive says, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from .chance import FORMULA, LEAST, LEVEL
from .findings import Fleet, Machines

SCHEMA = 1


def render(fleet: Fleet) -> str:
    """As JSON text, newline at its end."""
    return json.dumps(to_dict(fleet), indent=2, allow_nan=False) + "\n"


def to_dict(fleet: Fleet) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "archive": fleet.url,
        "runs": fleet.runs,
        "first_day": fleet.first_day or None,
        "last_day": fleet.last_day or None,
        "outcomes": dict(fleet.outcomes),
        "bound": {"formula": FORMULA, "level": LEVEL, "least_incidents": LEAST},
        "hosts": _machines(fleet.hosts),
        "gpus": _machines(fleet.gpus),
        "causes": [{"cause": one.name, **_counts(one)} for one in fleet.causes],
        "modules": [{"module": one.name, "class_and_cause": one.detail, **_counts(one)} for one in fleet.modules],
        "versions": [one._asdict() for one in fleet.versions],
    }


def _machines(machines: Machines) -> dict[str, Any]:
    return {
        "count": machines.count,
        "hours": machines.hours,
        "incidents": machines.incidents,
        "found": [{**asdict(one), "through": list(one.through)} for one in machines.found],
    }


def _counts(one: Any) -> dict[str, Any]:
    return {"runs": one.runs, "jobs": one.jobs, "last_run": one.last_run}
