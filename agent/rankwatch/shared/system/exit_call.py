"""What the kernel is asked to have done: the C library ends the process with exit code 77, whatever keeps the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from ...errors import EXIT_ABORTED

_SIGEV_THREAD = 2


class ExitCall(ctypes.Structure):
    """``struct sigevent`` of Linux, 64 bytes: a thread of the C library's own calls ``_exit(77)``.

    Raises:
        OSError, AttributeError: the C library has no such function.
    """

    _fields_ = (
        ("value", ctypes.c_void_p),  # a union: an ``int`` is the first half of its register
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * (64 - 2 * ctypes.sizeof(ctypes.c_int) - 3 * ctypes.sizeof(ctypes.c_void_p))),
    )

    def __init__(self) -> None:
        address = ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p).value
        super().__init__(EXIT_ABORTED, 0, _SIGEV_THREAD, address)


def realtime_libraries() -> Iterator[Any]:
    """Where timers and message queues may be: glibc before 2.34 has them in librt."""
    for name in (None, "librt.so.1"):
        try:
            yield ctypes.CDLL(name, use_errno=True)
        except OSError:
            continue
