"""What came apart, and the table of rules that gives each finding its pattern. Pure.

A finding is a set of parameters that came apart at one look, on the same ranks. What tells causes apart is *since when* these
parameters differ, on *how many ranks*, and *how many others* came apart as well:

- Replicas that were never equal began with different models. If most of the model is so, the ranks were initialised differently.
  If only some parameters are so, these were loaded or created differently.
- A majority that stays equal names the ranks that left it. Their memory, optimizer or code did it. What leaves out gradients
  touches all ranks alike: without a majority, the synchronisation itself is suspect.
- Synchronisation that is missing shows at the first change of the weights. If nearly all parameters came apart then, nothing
  is synchronised. If others changed and stayed equal, only these parameters are left out.
- Of two replicas that come apart later, nobody knows which is right, but one of them left the other.
- What nothing keeps equal may differ by intention. ``inferred.py`` waits until that is unlikely, and the rules for what is not
  declared rest on its answer.

How much came apart is known only after a while: groups of ranks follow each other, and so do the slots of a fingerprint. So
rules are applied when news is told, and again whenever further news is told.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rankwatch.shared.types.fingerprint import OF_BUFFERS

from .desync import DesyncPattern
from .votes import Split

NEVER = -1
INHERITED = -2
"""In the place of the last step at which a parameter was equal: an earlier collector found so, at a step that is not known."""


class Of(enum.Enum):
    """What is not what it must be."""

    WEIGHTS = enum.auto()
    GATHERED = enum.auto()
    INPUTS = enum.auto()


class Since(enum.Enum):
    """Since when parameters differ, in the life of the training."""

    BEGINNING = enum.auto()
    """They were never equal, and were looked at before the first step."""
    LOAD = enum.auto()
    """Weights were loaded since they were last equal."""
    FIRST_CHANGE = enum.auto()
    """Nothing had changed when they were last equal: what is wrong is wrong from the first steps on."""
    LATER = enum.auto()
    UNSEEN = enum.auto()
    """They were looked at for the first time in mid-run, and differed."""


class CameApart(NamedTuple):
    """These parameters, at the fingerprint of ``step``. ``equal_at`` has of each the last step at which it was equal.

    ``trains_alone``: the ranks are seen to exchange nothing, and most of their models differ.
    """

    step: int
    split: Split
    since: Since
    is_declared: bool
    source: str
    equal_at: Mapping[str, int]
    of: Of = Of.WEIGHTS
    trains_alone: bool = False


class Extent(NamedTuple):
    """How much of what must be equal came apart, over all groups of ranks."""

    most_never_equal: bool
    """Most of what was drawn was never equal."""
    most_unseen: bool
    """Most parameters have not been looked at since the first change."""
    others_change: bool
    """Beside the parameters that came apart at the first change, enough others changed and are equal."""
    most_later: bool
    """Most parameters came apart later."""


class PatternRule(NamedTuple):
    """A pattern, and the findings that have it."""

    pattern: DesyncPattern
    when: Callable[[CameApart, Extent], bool]


# The first rule that holds decides.
RULES = (
    PatternRule(DesyncPattern.BUFFER, lambda one, extent: one.source == OF_BUFFERS),
    PatternRule(DesyncPattern.SAME_INPUT, lambda one, extent: one.of is Of.INPUTS),
    PatternRule(DesyncPattern.GATHER, lambda one, extent: one.of is Of.GATHERED),
    # Never equal. What comes apart after that follows from it.
    PatternRule(DesyncPattern.INITIALISATION, lambda one, extent: one.is_declared and extent.most_never_equal),
    PatternRule(DesyncPattern.INITIALISATION, lambda one, extent: one.trains_alone and one.since is Since.BEGINNING),
    PatternRule(DesyncPattern.LOAD, lambda one, extent: one.since in (Since.BEGINNING, Since.LOAD)),
    PatternRule(DesyncPattern.UNKNOWN, lambda one, extent: one.since is Since.UNSEEN),
    # Equal before, and nothing keeps them equal as far as is known.
    PatternRule(DesyncPattern.UNSYNCHRONISED, lambda one, extent: one.trains_alone),
    PatternRule(DesyncPattern.SUBSET, lambda one, extent: not one.is_declared and one.since is Since.FIRST_CHANGE),
    PatternRule(DesyncPattern.ONE_RANK, lambda one, extent: not one.is_declared or one.split.has_majority),
    # Equal before, and now without a majority.
    PatternRule(DesyncPattern.UNKNOWN, lambda one, extent: one.since is Since.FIRST_CHANGE and extent.most_unseen),
    PatternRule(DesyncPattern.SUBSET, lambda one, extent: one.since is Since.FIRST_CHANGE and extent.others_change),
    PatternRule(DesyncPattern.UNSYNCHRONISED, lambda one, extent: one.since is Since.FIRST_CHANGE),
    PatternRule(DesyncPattern.ONE_RANK, lambda one, extent: one.split.replicas == 2),
    PatternRule(DesyncPattern.UNSYNCHRONISED, lambda one, extent: extent.most_later),
    PatternRule(DesyncPattern.UNKNOWN, lambda one, extent: True),
)


def pattern_of(found: CameApart, extent: Extent) -> DesyncPattern:
    return next(rule.pattern for rule in RULES if rule.when(found, extent))
