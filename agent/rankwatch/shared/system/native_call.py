"""What the kernel is asked to have done: the C library calls a function of its own in another thread, whatever keeps the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from ...errors import EXIT_ABORTED

_SIGEV_THREAD = 2


class NativeCall(ctypes.Structure):
    """``struct sigevent`` of Linux, 64 bytes.

    Args:
        function: a function of the C library that takes one argument.
        argument: a number or an address: ``value`` is a union, and an ``int`` is the first half of its register.

    Raises:
        OSError, AttributeError: the C library has no such function.
    """

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * (64 - 2 * ctypes.sizeof(ctypes.c_int) - 3 * ctypes.sizeof(ctypes.c_void_p))),
    )

    def __init__(self, function: str, argument: int) -> None:
        address = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value
        super().__init__(argument, 0, _SIGEV_THREAD, address)


def exit_call() -> NativeCall:
    """``_exit(77)``."""
    return NativeCall("_exit", EXIT_ABORTED)


def realtime_libraries() -> Iterator[Any]:
    """Where timers and message queues may be: glibc before 2.34 has them in librt."""
    for name in (None, "librt.so.1"):
        try:
            yield ctypes.CDLL(name, use_errno=True)
        except OSError:
            continue
