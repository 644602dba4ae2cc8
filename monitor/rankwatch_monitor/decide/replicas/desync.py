"""What is said of replicas that are not one model. The names in JSON are fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rankwatch.shared.str_enum import StrEnum
from rankwatch.shared.types.action import Action


class DesyncPattern(StrEnum):
    """Where and since when parameters differ, which gives the cause."""

    INITIALISATION = "initialisation"
    """They differed before the first step: ranks drew, or loaded, models of their own."""
    UNSYNCHRONISED = "unsynchronised"
    """They were equal, and all differ after a step: gradients are not synchronised."""
    SUBSET = "subset"
    """Some differ on all ranks from the first steps on: they are left out of the reduction."""
    ONE_RANK = "one-rank"
    """They were equal, and came apart on one rank: its memory, or its optimizer."""
    LOAD = "load"
    """They differ since weights were loaded."""
    GATHER = "gather"
    """What a rank gathered for the forward is not what the shards are: the network, or a collective."""
    BUFFER = "buffer"
    """A buffer that is in no checkpoint, and that nobody has written, is not the same on all ranks."""
    UNKNOWN = "unknown"
    SAME_INPUT = "same-input"
    """Two ranks are fed the same data."""
    NEVER_CHANGED = "never-changed"
    """A trainable parameter with a gradient never changed."""
    UNTIED = "untied"
    """Two parameters that were one are no longer equal."""


class PatternWords(NamedTuple):
    """What a pattern says of the training, and what to do. ``{one}`` stands for the rank, or for one of several.

    ``action`` is what to do for programs.
    """

    means: str
    remedy: str
    action: Action


WORDS = {
    DesyncPattern.INITIALISATION: PatternWords(
        "the ranks began with different models, by other seeds or without a broadcast of the weights",
        "before the first step, give all ranks the same seed or broadcast one rank's weights; or wrap the model in DDP",
        Action.FIX_CODE,
    ),
    DesyncPattern.UNSYNCHRONISED: PatternWords(
        "since these steps the gradients, or what the optimizers make of them, are not the same on these ranks",
        "call the wrapped model, end no_sync() before the last backward of a step, and check over which ranks the mesh reduces",
        Action.FIX_CODE,
    ),
    DesyncPattern.SUBSET: PatternWords(
        "these alone came apart, as if they were left out of the synchronisation of gradients",
        "reduce their gradients too: look at what is ignored, not wrapped, or held by each rank of a tensor-parallel group",
        Action.FIX_CODE,
    ),
    DesyncPattern.ONE_RANK: PatternWords(
        "equal before, so suspect the memory, the optimizer's state, or code of {one} alone",
        "load a checkpoint from before; if it happens again on the same GPU, test that GPU",
        Action.RESTART_ELSEWHERE,
    ),
    DesyncPattern.LOAD: PatternWords(
        "different since weights were loaded or created, so the ranks did not get the same values",
        "load the same checkpoint on all ranks, and compare the checksums of the files",
        Action.RESTORE_CHECKPOINT,
    ),
    DesyncPattern.GATHER: PatternWords(
        "suspect the network, or the collective",
        "test the links between the hosts of these ranks; if the replicas are equal, the weights are unharmed",
        Action.RESTART_ELSEWHERE,
    ),
    DesyncPattern.BUFFER: PatternWords(
        "it is in no checkpoint, and nobody wrote it since it was made: perhaps it holds what was in memory",
        "fill this buffer on each rank, after to_empty() and instead of torch.empty(); or is it meant to differ?",
        Action.FIX_CODE,
    ),
    DesyncPattern.UNKNOWN: PatternWords(
        "the cause is not known",
        "look at what the script does before this step that is not the same on all ranks",
        Action.STOP,
    ),
    DesyncPattern.SAME_INPUT: PatternWords(
        "these ranks learn from the same samples",
        "use a DistributedSampler, or put the rank into the seed that picks and shuffles the data",
        Action.FIX_CODE,
    ),
    DesyncPattern.NEVER_CHANGED: PatternWords(
        "it is in no optimizer, or each update is rounded away",
        "make the optimizer after all parameters exist; if it has this one, keep the weight in float32",
        Action.FIX_CODE,
    ),
    DesyncPattern.UNTIED: PatternWords(
        "two parameters that were one tensor are trained apart",
        "tie them again after weights are loaded or moved, and before the optimizer is made",
        Action.FIX_CODE,
    ),
}
"""What reports and documents say of each pattern."""

BY_PRODUCTS = frozenset({DesyncPattern.SAME_INPUT, DesyncPattern.NEVER_CHANGED, DesyncPattern.UNTIED})
"""Patterns that say nothing of replicas: these never end a run."""

OF_SINGLE_RANKS = frozenset({DesyncPattern.ONE_RANK, DesyncPattern.GATHER, DesyncPattern.SAME_INPUT})
"""Patterns that are about single ranks: on other ranks, it is another origin."""


@dataclass(frozen=True, slots=True)
class Desync:
    """One parameter that is not what it must be, since the fingerprint of optimizer step ``step`` showed it.

    ``ranks`` have other values than the majority of the ``replicas``; where there is no majority (of two, say): all that differ
    from one another. ``host`` and ``gpu`` are those of ``ranks``, where it is one rank; else empty. ``equal_at`` is the last
    step at which this parameter was seen equal; -1: never. ``is_declared``: whether something keeps the replicas equal (DDP,
    say), so that this cannot be meant. Entries with the same ``origin`` came apart together: one line tells them.
    """

    step: int
    parameter: str
    ranks: tuple[int, ...]
    replicas: int
    pattern: DesyncPattern
    host: str = ""
    gpu: str = ""
    equal_at: int = -1
    is_declared: bool = True
    source: str = ""
    origin: int = 0

    @property
    def is_split(self) -> bool:
        """Whether replicas that something keeps equal are not: what ``--on-desync abort`` ends a run for."""
        return self.is_declared and self.pattern not in BY_PRODUCTS


@dataclass(frozen=True, slots=True)
class Compared:
    """What was compared so far: ``parameters`` of ``ranks`` ranks, ``times`` comparisons, the last one after step ``step``.

    ``equal``: whether all parameters were equal when they were last compared.
    """

    step: int
    parameters: int
    ranks: int
    times: int
    equal: bool
