"""The table with all its trainings of several ranks."""

from typing import Any

from recorded.truths import Healthy

from . import culprits, schedules  # noqa: F401  they fill the table
from .agreeing import averaging, data, data_parallel, loops, numbers, own, sharded, tensors, weights, wrapped  # noqa: F401
from .case import Case, cases
from .desynced import alone, learned, modes, replicated  # noqa: F401
from .desynced import sharded as shards  # noqa: F401
from .truths import Apart, Fate

CULPRITS, AGREEING, DESYNCED = cases(Fate), cases(Healthy), cases(Apart)
TABLES: dict[str, dict[str, Case[Any]]] = {"culprits": CULPRITS, "agreeing": AGREEING, "desynced": DESYNCED}
