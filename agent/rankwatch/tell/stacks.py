"""Where the threads of this process are: the answer of a rank that stalls, made beside the thread that is stuck.

Frames come innermost first. Frames of rankwatch are left out, unless they are the innermost ones.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import chain, islice, takewhile
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ..shared.link.allowance import Allowance
from ..shared.printable import printable
from ..shared.system.process import age
from ..shared.system.waiting import doing, python_stack
from ..shared.types.messages import MAX_STACK_LINE, MAX_STACK_LINES, Inspected
from ..touch.stack import outwards
from ..touch.whose_code import OURS, is_installed, owner_of, short, text_of

log = logging.getLogger(__name__)

MAIN_FRAMES, OTHER_FRAMES = 24, 6
"""Frames that are told of the main thread, and of each other thread."""

MAX_THREADS_LINES = MAX_STACK_LINES - 3

MAIN = "main thread"

MAX_DEPTH = 1000
"""Frames that are looked at."""

MAX_WORKERS = 8
"""Processes of a DataLoader that are told."""

PATIENCE = 1.5
"""Seconds for which source files are waited for: they may be on a file system that hangs, which is why the rank stalls."""

SPY_PATIENCE = 1.2
"""Seconds for which ``py-spy`` is waited for: less than PATIENCE, after which an answer goes without all this."""

LOOKS_PER_SECOND, LOOKS_AT_ONCE = 0.5, 6.0
"""A look takes a few milliseconds. A collector asks every two seconds at most."""

_WRAPPERS = os.path.join(OURS, "measure", "collectives.py")
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_WAITING = os.path.join("torch", "distributed", ""), os.path.join("torch", "nn", "parallel", "distributed.py")
_SAVING = os.path.join("torch", "distributed", "checkpoint", "")
_CALLING = os.path.join("torch", "_ops.py")
"""Files of torch: whose functions wait for other ranks; which of them wait for a disk; and where any operator is called."""
_ENGINE = "_engine_run_backward"
"""The function of torch in which a backward is, and so a collective that DDP has begun in it."""
_LOADERS = "dataloader.py"
"""The end of the file of torch's DataLoader, and of that of torchdata."""
_ARGUMENTS = ("tensor", "input", "input_tensor", "tensor_list", "input_tensor_list", "output", "output_tensor", "tensors")
"""Names of what a collective of torch works on, in its own functions."""

_KINDS = (
    "broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
    "gather", "scatter", "reduce_scatter", "all_to_all_single", "all_to_all", "send", "recv", "recv", "barrier",
    "reduce_scatter_tensor", "coalesced operation", "sparse all_reduce",
)  # fmt: skip
"""What a Work of torch is for, by its number there (OpType)."""

_PLUMBING = frozenset({"_call_impl", "_wrapped_call_impl", "decorate_context"})
"""Functions of torch that stand between any two frames of interest; a file of torch has more of them, and so does Python."""
_LOGGING = os.path.join("torch", "distributed", "c10d_logger.py")

_TRACES = (
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
)
"""Variables of torch: the first part of the path of a flight recorder's file, and how many collectives it holds."""


class Place(NamedTuple):
    """Where a frame was when it was looked at."""

    code: CodeType
    line: int

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def is_ours(self) -> bool:
        return owner_of(self.file) == "ours"

    @property
    def is_plumbing(self) -> bool:
        return self.code.co_name in _PLUMBING or self.file.endswith(_LOGGING) or self.file.startswith("<frozen")

    def describe(self, *, with_source: bool) -> str:
        text = text_of(self.file, self.line) if with_source else ""
        return f"{short(self.file)}:{self.line} in {self.code.co_name}" + (f": {text}" if text else "")


class ThreadStack(NamedTuple):
    """A thread, by its name or as the main one. ``collective``: of torch, that it is in; empty if in none, or not looked for.

    ``workers``: of the DataLoader that it waits for.
    """

    title: str
    places: list[Place]
    collective: str
    workers: list[Worker]


class Worker(NamedTuple):
    """A process of a DataLoader. ``is_next``: the batch that comes next is its."""

    number: int
    pid: int
    is_next: bool


class Inspector:
    """Answers INSPECT, for the link's thread.

    Args:
        rank: this process's.
        wake: called in any thread when there is an answer to be taken.
    """

    def __init__(self, rank: int, wake: Callable[[], None]) -> None:
        self._rank = rank
        self._wake = wake
        self._answer: Inspected | None = None
        self._looks = Allowance(LOOKS_PER_SECOND, LOOKS_AT_ONCE)
        self._since: float | None = None
        """Since when a thread is looking; None: none is."""

    def ask(self, number: int) -> None:
        """A thread looks: the link's own must never wait for a file."""
        now = time.monotonic()
        if self._since is not None:
            if now - self._since > PATIENCE and self._looks.take(now):
                self._look(number, with_files=False)
            return
        if not self._looks.take(now):
            return
        self._since = now
        try:
            threading.Thread(target=self._look_beside, args=(number,), name="rankwatch-stacks", daemon=True).start()
        except RuntimeError:  # this process can start no more threads
            self._since = None
            self._look(number, with_files=False)

    def take(self) -> Inspected | None:
        """The answer, once."""
        answer, self._answer = self._answer, None
        return answer

    def _look_beside(self, number: int) -> None:
        self._look(number, with_files=True)
        self._since = None
        self._wake()

    def _look(self, number: int, *, with_files: bool) -> None:
        try:
            self._answer = inspect(number, self._rank, with_files=with_files)
        except Exception:
            log.exception("rankwatch: an error of ours while the stacks were looked at; training goes on")
            self._answer = Inspected(number, "", ("not known: an error of rankwatch, which this rank has logged",))


def inspect(number: int, rank: int, *, with_files: bool) -> Inspected:
    """Where all threads but our own are, the main thread first. ``with_files``: with lines of source files."""
    waits, collective, lines = "", "", list[str]()
    for thread in _threads():
        places = _visible(thread.places)
        if not places:
            continue
        most = OTHER_FRAMES
        if thread.title == MAIN:
            most, collective = MAIN_FRAMES, thread.collective
            waits = _describe_wait(places, collective, with_source=with_files)
        lines.append(thread.title)
        lines += [f"  {place.describe(with_source=with_files)}" for place in places[:most]]
        lines += [f"  and {len(places) - most} outer frames"] if len(places) > most else []
        lines += _describe_workers(thread.workers) if with_files else ()
        if len(lines) > MAX_THREADS_LINES:
            lines[MAX_THREADS_LINES:] = ["and more threads"]
            break
    lines += _pointers(rank) if with_files else ()
    told = tuple(printable(line, MAX_STACK_LINE) for line in lines)
    return Inspected(number, printable(waits, MAX_STACK_LINE), told, printable(collective, MAX_STACK_LINE))


def _threads() -> list[ThreadStack]:
    """All threads but our own, the main thread first.

    The frames are let go of here, before any file is read: a frame holds what its function works on, and if the training goes on
    meanwhile, what is let go of last is freed in our thread.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    current = sys._current_frames()
    current.pop(threading.get_ident(), None)  # which would hold itself and all others, until a garbage collection
    found = list[ThreadStack]()
    for ident, innermost in sorted(current.items(), key=lambda one: one[0] != main):
        name = names.get(ident, "not one of Python's")
        if name.startswith("rankwatch-"):
            continue
        frames = list(islice(outwards(innermost), MAX_DEPTH))
        # Code that torch has made may have no lines.
        places = [Place(frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno) for frame in frames]
        is_main = ident == main
        collective = _collective(frames) if is_main else ""
        found.append(ThreadStack(MAIN if is_main else f"thread {name}", places, collective, _workers(frames)))
    return found


def _visible(places: list[Place]) -> list[Place]:
    """What a person wants to see: our frames only where they are the ones that wait, and no plumbing."""
    places = [place for place in places if not place.is_plumbing]
    innermost = list(takewhile(lambda place: place.is_ours, places))
    others = [place for place in places[len(innermost) :] if not place.is_ours]
    return [place for place in innermost if place.file != _WRAPPERS] + others if others else []


def _describe_wait(places: list[Place], collective: str, *, with_source: bool) -> str:
    """The innermost frame, or the collective that it is in, and the line of the user's that led there."""
    users = next((place for place in places if not is_installed(place.file)), None)
    if not collective and (users is None or users is places[0]):
        return places[0].describe(with_source=with_source)
    what = collective or f"{places[0].code.co_name} ({short(places[0].file)}:{places[0].line})"
    return what if users is None else f"{what}, called at {users.describe(with_source=with_source)}"


def place_of(error: BaseException) -> str:
    """The user's innermost line in the traceback of an exception, ``train.py:40 in step``; empty: there is none, or no line is to
    blame. The text of a SyntaxError has a line, and a signal or an exit may come in any."""
    if not isinstance(error, Exception) or isinstance(error, SyntaxError):
        return ""
    places = [Place(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
    try:
        own = (place for place in places if not is_installed(place.file))
        installed = (place for place in places if owner_of(place.file) == "user")
        found = next(chain(own, installed), None)
        return "" if found is None else found.describe(with_source=False)
    except OSError:  # the folder that the process runs in is gone
        return ""


def _collective(frames: list[FrameType]) -> str:
    """The collective of torch that a thread is in, as far as its frames tell; empty: in none."""
    codes = [(frame, frame.f_code.co_filename, frame.f_code.co_name) for frame in frames]
    within = [frame for frame, file, name in codes if file.endswith(_COLLECTIVES) and not name.startswith("_")]
    awaited = next((frame for frame, file, name in codes if file == _WRAPPERS and name == "wait"), None)
    if not within and awaited is None:
        return ""
    # An exchange of objects is made of others: what the user has called is the outermost.
    name = within[-1].f_code.co_name if within else "wait for a collective that was begun before"
    try:
        if awaited is not None and not within:
            kind = int(awaited.f_locals["self"]._get_op_type())
            return f"wait for the {_KINDS[kind]} that was begun before"
        return name + _describe_arguments(within[0].f_locals, within[-1].f_locals)
    except Exception:  # the frame goes on, or another version of torch has other names
        log.debug("no details of %s", name, exc_info=True)
        return name


def may_wait_for_ranks() -> bool:
    """Whether the main thread is where a training waits for other ranks: in a collective of torch, or in a backward."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [] if innermost is None else list(islice(outwards(innermost), MAX_DEPTH))
    code = next((frame.f_code for frame in frames if not frame.f_code.co_filename.endswith(_CALLING)), None)
    if code is None:
        return False
    waits = code.co_name == _ENGINE or any(part in code.co_filename for part in _WAITING)
    return (waits and _SAVING not in code.co_filename) or bool(_collective(frames))


def _workers(frames: list[FrameType]) -> list[Worker]:
    """The processes of the DataLoader whose next batch a thread waits for."""
    try:
        for frame in frames:
            if frame.f_code.co_filename.endswith(_LOADERS) and (loader := frame.f_locals.get("self")) is not None:
                processes = list(getattr(loader, "_workers", ()))
                (following, *_) = getattr(loader, "_task_info", {}).get(getattr(loader, "_rcvd_idx", None), (None,))
                return [Worker(number, one.pid or 0, number == following) for number, one in enumerate(processes)]
    except Exception:
        log.debug("no workers of a DataLoader", exc_info=True)
    return []


def _describe_workers(workers: list[Worker]) -> Iterator[str]:
    """The one whose batch comes next first."""
    for worker in sorted(workers, key=lambda one: not one.is_next)[:MAX_WORKERS]:
        awaited = ", whose batch comes next," if worker.is_next else ""
        yield f"  DataLoader worker {worker.number} (pid {worker.pid}){awaited} {doing(worker.pid)}"
        for file, line, name in python_stack(worker.pid, SPY_PATIENCE) if worker.is_next else ():
            yield f"    {short(file)}:{line} in {name}"
    if len(workers) > MAX_WORKERS:
        yield f"  and {len(workers) - MAX_WORKERS} more workers"


def _describe_arguments(inner: dict[str, Any], outer: dict[str, Any]) -> str:
    given: Any = next((inner[name] for name in _ARGUMENTS if inner.get(name) is not None), None)
    first: Any = given[0] if isinstance(given, (list, tuple)) and given else given
    what = ""
    if hasattr(first, "shape") and hasattr(first, "dtype"):
        shape = " x ".join(map(str, first.shape)) or "1"
        what = f" of {shape} {str(first.dtype).removeprefix('torch.')}"
    group = inner.get("group") or outer.get("group") or sys.modules["torch.distributed"].group.WORLD
    return f"{what} ({sys.modules['torch.distributed'].get_backend(group)}, {group.size()} ranks)"


def _pointers(rank: int) -> Iterator[str]:
    """What torch itself can show of the stall."""
    server = getattr(sys.modules.get("torch.distributed.debug"), "_WORKER_SERVER", None)
    if server is not None:
        yield f"torch's debug server of this rank: http://{socket.gethostname()}:{server.port}; rank 0 has the page of all ranks"
    prefixes, sizes = ([os.environ[name] for name in names if os.environ.get(name)] for names in _TRACES)
    usual = [os.path.join(os.path.expanduser("~"), ".cache", "torch", "comm_lib_trace_rank_"), "/tmp/nccl_trace_rank_"]
    written = [path for path in (f"{prefix}{rank}" for prefix in chain(prefixes, usual)) if _is_of_this_process(path)]
    if written:
        yield f"torch's flight recorder has written {written[0]}"
    elif prefixes and any(size.strip() not in ("", "0") for size in sizes):
        yield f"torch's flight recorder writes {prefixes[0]}{rank} when the collective times out"


def _is_of_this_process(path: str) -> bool:
    try:
        return time.time() - os.path.getmtime(path) <= age()
    except OSError:
        return False
