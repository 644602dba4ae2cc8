"""Modules that run outside of the watched model, and are not trained here: a VAE, a text encoder, a teacher.

What they return is measured as they return it. Their inputs are not kept: where these still live at a trip, the call can be run
again. All watches of a process share one list, which ``api/registry`` has: the finder of models sees such modules, and every
watched model may be given what they made.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ..measure.modules import NamedModule
from ..measure.recorder import PendingFrame, Recorder
from ..measure.tape import PendingRead, Tape
from ..measure.walk import inputs, leaves
from ..rerun.forward import Forward, RootEntry
from ..shared.types.frame import NOWHERE, Kind
from ..touch.unseen import OutsideOfGraph
from .events import BackwardEnded, RootBegan, RootLeft

log = logging.getLogger(__name__)

MAX_CALLS = 64
"""Calls in a batch that are remembered, the last ones: a diffusion model's text encoders and VAE are three."""

MAX_TENSORS = 8
"""Tensors of a call that are measured, of its inputs and of its outputs. A language model may return those of all its layers."""


class _SeenCall(NamedTuple):
    frame: PendingFrame
    args: Any
    kwargs: Any
    entry: RootEntry

    def forward(self, label: str) -> Forward | None:
        """The call, to be run again; None: its inputs are gone, or were changed."""
        gone = False

        def alive(kept: _Kept) -> Any:
            nonlocal gone
            value = kept.tensor()
            gone |= value is None or value._version != kept.version
            return value

        args, kwargs = pytree.tree_map_only(_Kept, alive, (self.args, self.kwargs))
        module = self.frame.named.module
        return None if gone else Forward(module, args, kwargs, label, entry=self.entry, is_live=False)


class _Kept:
    """An input of a call: it lives no longer for our sake."""

    def __init__(self, value: Tensor) -> None:
        self.tensor = ref(value)
        self.version = -1 if value.is_inference() else value._version


class OutsideCall(NamedTuple):
    """The first call in a batch that returned what is not finite; ``forward``: None if it cannot be run again."""

    frame: PendingFrame
    forward: Forward | None


class Outside:
    """The calls of such modules in the batch that runs, and in the one before. A batch is over with its backward, or as an
    evaluation ends; what is called from then on is the next one's.
    """

    events = (RootBegan, RootLeft, BackwardEnded)

    def __init__(self) -> None:
        self.modules: list[NamedModule] = []
        self._tape = Tape()
        self._recorder = Recorder(self._tape, 0)
        self._calls: deque[_SeenCall] = deque(maxlen=MAX_CALLS)
        self._before: deque[_SeenCall] = deque()
        """Those of the batch before, whose training went on: what was not finite in them is harmless."""
        self._reads: list[PendingRead] = []
        self._is_over = False
        self._is_evaluation = False
        self._depth = 0
        self._count = 0
        self._is_off = False

    def watch(self, module: nn.Module, name: str) -> Callable[[], None]:
        """Measures what a module returns from now on, and returns the function that ends this."""
        self._count += 1
        named, thread, entries = NamedModule(module, [name], self._count), threading.get_ident(), list[RootEntry | None]()

        def begins(args: Any, kwargs: Any) -> None:
            self._depth += 1
            is_seen = self._depth == 1 and threading.get_ident() == thread
            entries.append(RootEntry(module, (), {}) if is_seen else None)

        def returned(args: Any, kwargs: Any, output: Any) -> None:
            self._depth = max(self._depth - 1, 0)
            entry = entries.pop() if entries else None
            if entry is not None and output is not None:
                self._add(named, args, kwargs, output, entry)

        handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(OutsideOfGraph(self._guarded(begins)), with_kwargs=True),
            module.register_forward_hook(OutsideOfGraph(self._guarded(returned)), with_kwargs=True, always_call=True),
        ]

        self.modules.append(named)

        def end() -> None:
            if named in self.modules:
                self.modules.remove(named)
            for handle in handles:
                handle.remove()

        return end

    def on(self, event: RootBegan | RootLeft | BackwardEnded) -> None:
        match event:
            case RootBegan(origin):
                self._is_evaluation = origin is None
                self._begin()
            case RootLeft():
                self._is_over |= self._is_evaluation
            case BackwardEnded():
                self.end_batch()

    def end_batch(self) -> None:
        """What is called from now on is another batch's."""
        self._is_over = True

    def first_bad(self) -> OutsideCall | None:
        """Of the batch that runs: the first call that returned what is not finite, and did not in the batch before."""
        for read in self._reads:
            read.finish()
        self._reads.clear()
        self._tape.read()
        harmless = {key for call in self._before for key, _ in _bad_outputs(call)}
        for call in self._calls:
            bad = [label for key, label in _bad_outputs(call) if key not in harmless]
            if bad:
                return OutsideCall(call.frame, call.forward(bad[0]))
        return None

    def _guarded(self, body: Callable[..., None]) -> Callable[..., None]:
        def guarded(*given: Any) -> None:
            try:
                if not self._is_off:
                    body(*given)
            except Exception:
                self._is_off = True
                log.exception(
                    "rankwatch: an error of its own at a module outside of the model; such modules are not looked at"
                )

        return guarded

    def _begin(self) -> None:
        """What runs now is another batch's, if the last one is over."""
        if self._is_over:
            self._is_over, self._before, self._calls = False, self._calls, deque(maxlen=MAX_CALLS)
            self._reads = [self._tape.read_later()]

    def _add(self, named: NamedModule, args: Any, kwargs: Any, output: Any, entry: RootEntry) -> None:
        self._begin()
        given = [(kind, path, leaf) for kind, label, one in inputs(args, kwargs, Kind.INPUT, Kind.KEYWORD)
                 for path, leaf in leaves(one, label) if isinstance(leaf, Tensor)]  # fmt: skip
        made = [(Kind.OUTPUT, path, leaf) for path, leaf in leaves(output, "output") if isinstance(leaf, Tensor)]
        with torch.no_grad():
            self._recorder.begin(0, 0)  # what was measured for the call before may have been freed
            frame = self._recorder.values(NOWHERE, named, [*given[:MAX_TENSORS], *made[:MAX_TENSORS]])
        kept_args, kept_kwargs = pytree.tree_map_only(Tensor, _Kept, (args, kwargs))
        self._calls.append(_SeenCall(frame, kept_args, kept_kwargs, entry))


def _bad_outputs(call: _SeenCall) -> list[tuple[tuple[Any, ...], str]]:
    frame = call.frame
    return [
        ((frame.named.names[0], row.label, cell.state), row.label)
        for row, cell in zip(frame.spec.readings, frame.cells, strict=True)
        if row.kind is Kind.OUTPUT and cell.is_bad
    ]
