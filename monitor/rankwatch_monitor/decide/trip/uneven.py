"""Whether the ranks count alike: in the same batch they must have done the same number of optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwatch.shared.bounded import BoundedDict

MAX_BATCHES = 256
"""Batches for which the step is retained: ranks that are further apart are not compared."""


@dataclass(slots=True)
class StepCounts:
    """The optimizer step that each of the last batches of a stage came before, as the ranks reported it.

    ``uneven`` says which ranks disagreed first; empty: none did. It stays: the ranks keep on counting as they began.
    """

    uneven: str = ""
    _steps: BoundedDict[tuple[int, int], list[int]] = field(default_factory=lambda: BoundedDict(MAX_BATCHES))
    """By stage and batch: the step, the rank that reported it first, and how many ranks reported the same."""

    def take(self, rank: int, stage: int, batch: int, step: int) -> str:
        """What there is to say if this rank is the first one that disagrees with another; else empty."""
        known = self._steps.get((stage, batch))
        if known is None:
            self._steps[stage, batch] = [step, rank, 1]
        elif known[0] == step:
            known[2] += 1
        elif not self.uneven:
            return _describe(rank, batch, step, *known)
        return ""


def _describe(rank: int, batch: int, step: int, known: int, other: int, others: int) -> str:
    more = "more batches" if step < known else "fewer batches"
    if others > 1:
        return f"rank {rank} counts {more} than others: its batch {batch} is of optimizer step {step}, on rank {other} of {known}"
    first, second = sorted(((rank, step), (other, known)))
    return (
        f"ranks {first[0]} and {second[0]} count batches differently: "
        f"batch {batch} is of optimizer step {first[1]} on rank {first[0]}, of {second[1]} on rank {second[0]}"
    )
