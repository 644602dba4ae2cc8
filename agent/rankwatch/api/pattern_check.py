"""Says which patterns of the options ``modules`` and ``ignore`` match nothing in the model: they are mistyped, mostly."""

from __future__ import annotations

import logging

from torch import nn

from ..measure.modules import class_name, named_modules, unwrap
from ..shared.types.config import Config
from ..shared.types.frame import BatchSummary, FrameTable
from ..shared.words.patterns import describe_unmatched, ignorable, unmatched

log = logging.getLogger(__name__)

BATCHES = 2
"""From the first batch that was measured whole: by then the backward of that one is there, too."""


class PatternCheck:
    """Looks at ``modules`` at once, and at ``ignore`` once the labels of a whole batch are known. Each is said once."""

    def __init__(self, model: nn.Module, config: Config, *, is_asked: bool) -> None:
        """``is_asked``: of all ranks one says it; and no stage of a pipeline, which has a part of the model."""
        self._ignore = config.ignore if is_asked else ()
        self._every = config.every or 1
        self._first = -1
        self._names: set[str] = set()
        if is_asked and (config.modules or config.ignore):
            self._names = {name for named in named_modules(model).values() for name in named.names}
            _say(describe_unmatched("modules", config.modules, self._names, f"module of {class_name(unwrap(model))}"))
            if config.modules and len(unmatched(config.modules, self._names)) == len(config.modules):
                _say(["modules: no pattern matches, so the root alone is watched"])

    def take(self, table: FrameTable, summary: BatchSummary) -> None:
        if not self._ignore:
            return
        if self._first >= 0 and summary.batch >= self._first + BATCHES:
            _say(describe_unmatched("ignore", self._ignore, self._names, "module, and no reading of the first batches"))
            self._ignore, self._names = (), set()
        elif self._first >= 0 or summary.batch % self._every == 0:
            self._first = summary.batch if self._first < 0 else self._first
            self._names.update(name for spec in table.specs for row in spec.readings for name in ignorable(spec, row))


def _say(lines: list[str]) -> None:
    for line in lines:
        log.warning("rankwatch: %s", line)
