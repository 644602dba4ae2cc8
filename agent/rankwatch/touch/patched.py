"""How functions of torch are wrapped: once for the process. The wrapper stays; while nobody listens, it costs next to nothing.

Whoever listens is in a ``WeakSet`` beside the wrapper, which calls the original alone while that is empty.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes the wrapper of a function."""

OURS = "_rankwatch"
"""The attribute of a function of ours that is in the place of another one."""


def patch(holder: Any, name: str, wrap: Wrap) -> None:
    """Puts ``wrap(original)`` in the place of a function of a module, or a method of a class, if there is one.

    A method that a class has from its parent, where it is wrapped, is not wrapped again.
    """
    original = getattr(holder, name, None)
    if original is None or hasattr(original, OURS):
        return
    wrapper = functools.wraps(original)(wrap(original))
    setattr(wrapper, OURS, True)
    try:
        setattr(holder, name, wrapper)
    except (AttributeError, TypeError) as error:  # private, so it may change
        log.debug("cannot wrap %s: %s", name, error)


def remove_our_frame(error: BaseException) -> None:
    """Removes the frame of a wrapper from a traceback. (In Python 3.10 ``raise`` restores it.)"""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
