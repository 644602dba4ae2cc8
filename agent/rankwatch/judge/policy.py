"""Decides which readings of a frame trip."""

from __future__ import annotations

from collections.abc import Sequence

from ..shared.bounded import BoundedDict
from ..shared.types.config import Policy
from ..shared.types.frame import FrameSpec, Kind, ReadingSpec, State
from ..shared.words.patterns import ignorable, matches

_NON_FINITE = (State.INF, State.NAN)
_MADE_HERE = (Kind.PARAMETER, Kind.OUTPUT, Kind.MARKED, Kind.LOSS, Kind.GRAD_INPUT, Kind.GRADIENT)
_TRIPPING: dict[Policy, dict[Kind, tuple[State, ...]]] = {
    Policy.FIRST: dict.fromkeys(_MADE_HERE, _NON_FINITE),
    Policy.STRICT: dict.fromkeys(Kind, _NON_FINITE) | dict.fromkeys((Kind.BUFFER, Kind.KEYWORD), (State.NAN,)),
    Policy.OFF: {},
}
_TRIPPING_AT_ROOT = _TRIPPING | {Policy.FIRST: _TRIPPING[Policy.FIRST] | {Kind.GRAD_OUTPUT: _NON_FINITE}}

_MAY_BE_MEANT = (Kind.OUTPUT, Kind.MARKED)

MAX_RULES = 4096


class Judge:
    """Decides which readings of a frame trip. ``ignore``: shell patterns of ``module`` or ``module:label``."""

    def __init__(self, policy: Policy, ignore: Sequence[str] = ()) -> None:
        self._policy = policy
        self._ignore = tuple(ignore)
        self._meant = BoundedDict[tuple[str, str], None](MAX_RULES)
        self._forgiven = BoundedDict[tuple[str, str], None](MAX_RULES)
        self._rules = BoundedDict[FrameSpec, tuple[tuple[State, ...], ...]](MAX_RULES)

    def ignoring(self, patterns: Sequence[str]) -> Judge:
        """The same judge with other patterns."""
        other = Judge(self._policy, patterns)
        other._meant, other._forgiven = self._meant, self._forgiven
        return other

    def allow_inf(self, spec: FrameSpec, row: ReadingSpec) -> bool:
        """The code writes an inf there: from now on only nan trips. Returns False where the policy knows no such inf."""
        if self._policy is not Policy.FIRST or (spec.module, row.label) in self._meant:
            return False
        self._meant[spec.module, row.label] = None
        self._rules.clear()
        return True

    def forgive(self, module: str, label: str) -> None:
        """What was bad there has harmed nothing: it trips no more."""
        self._forgiven[module, label] = None
        self._rules.clear()

    def meant_by(self, module: str) -> list[str]:
        """The readings of a module in which the code writes an inf, as in ``Trip.harmless``."""
        return [f"{module}:{label}" for name, label in self._meant if name == module]

    def tripping(self, spec: FrameSpec, states: bytes) -> list[int]:
        """The indices of the readings that trip, in ascending order."""
        # The hot path: nearly every frame is finite, which two searches in a few bytes find out.
        if State.INF not in states and State.NAN not in states:
            return []
        return [row for row, (rule, state) in enumerate(zip(self._rules_of(spec), states, strict=True)) if state in rule]

    def _rules_of(self, spec: FrameSpec) -> tuple[tuple[State, ...], ...]:
        """For each reading of the frame, the states in which it trips."""
        if spec not in self._rules:
            tripping = (_TRIPPING if spec.module else _TRIPPING_AT_ROOT)[self._policy]
            self._rules[spec] = tuple(
                ()
                if (spec.module, row.label) in self._forgiven or self._is_ignored(spec, row)
                else (State.NAN,)
                if row.kind in _MAY_BE_MEANT and (spec.module, row.label) in self._meant
                else tripping.get(row.kind, ())
                for row in spec.readings
            )
        return self._rules[spec]

    def _is_ignored(self, spec: FrameSpec, row: ReadingSpec) -> bool:
        return any(matches(name, self._ignore) for name in ignorable(spec, row))
