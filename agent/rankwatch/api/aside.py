"""What a process has done beside its training: the file that it saved last, and a run of W&B that it has opened by now."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..shared.types.frame import Whereabouts
from ..shared.types.messages import MAX_MADE_WITH
from ..touch.patched import patch
from .registry import open_watches

log = logging.getLogger(__name__)

_DCP = "torch.distributed.checkpoint"

_last = ""


def see_saves() -> None:
    """From now on files are noted that ``torch.save`` writes, or the distributed checkpoint where it is imported by now."""
    patch(torch, "save", _noted(1, "f"))
    if _DCP in sys.modules:
        patch(sys.modules[_DCP], "save", _noted(1, "checkpoint_id"))


def _noted(place: int, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``place`` and ``name`` of the argument that says where to."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*arguments: Any, **named: Any) -> Any:
            done = original(*arguments, **named)
            _note(named.get(name, arguments[place] if len(arguments) > place else None))
            return done

        return save

    return wrap


def _note(where: Any) -> None:
    """A save into memory has no name."""
    global _last
    try:
        path = where if isinstance(where, os.PathLike) else getattr(where, "name", where)
        if isinstance(path, (str, os.PathLike)):
            batches = [watch.where().moment.batch for watch in open_watches()]
            after = f", after batch {max(batches)}" if max(batches, default=-1) >= 0 else ""
            _last = f"{os.path.abspath(os.fspath(path))}{after}"
    except Exception:  # the save is done: whatever is wrong here is none of its business
        log.debug("rankwatch: a save was not noted", exc_info=True)


def wandb_url() -> str:
    """The address of the run that the training has opened."""
    url = getattr(getattr(sys.modules.get("wandb"), "run", None), "url", "")
    return url if isinstance(url, str) else ""


def aside(at: Whereabouts) -> tuple[str, ...]:
    """Lines such as ``saved: /data/step-50.pt, after batch 49``. What is not known has no line."""
    told = {"saved": _last, "wandb": wandb_url(), "rates": at.rates, "written": at.writes}
    return tuple(f"{name}: {text}"[:MAX_MADE_WITH] for name, text in told.items() if text)
