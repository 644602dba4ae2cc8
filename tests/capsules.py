"""Capsules of forwards that went bad: written, opened, changed, and run again in this process."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

import makers
from rankwatch.replay.code import UsersCode
from rankwatch.replay.opened import OpenedCapsule, open_capsule
from rankwatch.replay.trial import Trial
from rankwatch.rerun.capsule.capsule import CapsuleRules, write
from rankwatch.rerun.capsule.files import MANIFEST, SUMS
from rankwatch.rerun.forward import Forward


def opened(
    folder: Path, module: nn.Module, *args: Any, output: Any = None, with_inputs: bool = True, **kwargs: Any
) -> OpenedCapsule:
    """The capsule of a forward that was given ``args`` and ``kwargs``, and returned ``output``."""
    forward = Forward(module, args, kwargs, "output")
    found = write(CapsuleRules(folder, with_inputs=with_inputs), forward, makers.trip(), name="a", output=output)
    assert found.path is not None, found.why_not
    return open_capsule(found.path)


def trial_of(capsule: OpenedCapsule, **options: Any) -> Trial:
    """``options``: those of ``UsersCode``."""
    return Trial(capsule, UsersCode(capsule.manifest["code"], capsule.sources, [], **options))


def seal(capsule: Path, manifest: dict[str, Any]) -> None:
    """Writes a changed manifest with its checksum."""
    before = hashlib.sha256((capsule / MANIFEST).read_bytes()).hexdigest()
    (capsule / MANIFEST).write_text(json.dumps(manifest))
    after = hashlib.sha256((capsule / MANIFEST).read_bytes()).hexdigest()
    (capsule / SUMS).write_text((capsule / SUMS).read_text().replace(before, after))
