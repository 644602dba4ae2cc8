"""Takes fingerprints: checksums of the parameters as the first forward after an optimizer step begins.

All optimizers are done then, those that step in the backward, too, and replicas are equal. Only forwards of batches count:
for an evaluation, a rank may use other weights. The parameters are spread over slots, one of which is due at each step; all
are due at the first steps, and where weights were loaded or the model has changed.

What FSDP gathers for a module is read as that module's forward begins. A fingerprint is sent when its checksums have come from
their device: at once from the host, else with a later call.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..judge.batch import BatchInProgress
from ..judge.events import ForwardBegan, RootReturned, StepBegins, StepDone
from ..judge.reporter import Reporter
from ..judge.steps.optimizer_steps import OptimizerSteps
from ..measure.collectives import Collectives, Traffic
from ..measure.modules import Modules, class_name, unwrap, wrapped_in
from ..shared.types.fingerprint import ALL_ROWS, Fingerprint
from ..shared.types.notice import Notice, NoticeKind
from ..touch.torch_private import active_ddp, comm_hooks_of, has_rpc
from ..touch.unseen import OutsideOfGraph, quietly
from .join_count import era, watch_joins
from .lanes import Lanes, Pair, beginning, combined, packed
from .meshes import LaidParameter
from .slots import Plan, Signs, world_size
from .ties import Ties
from .unmoving import Unmoving

ALL_UNTIL = 2
"""Up to this ordinal, all rows are taken: what is wrong from the start shows at once."""

ALONE_EVERY = 16
"""Steps between two looks at parameters that have not changed yet, where there is no rank to compare with."""

MAX_INPUTS = 64
"""Tensors of an input that are read: ranks that are fed the same data have the same beginnings of them."""

_UNSEEN = ("horovod", "byteps", "bagua", "hivemind", "mpi4py", "ray.util.collective", "torch_xla")
"""Packages by which ranks talk to each other, other than torch's process groups."""


class _Ordinal(NamedTuple):
    era: int
    number: int


class FingerprintTaker:
    """The fingerprints of one model.

    Args:
        every: the number of slots; 0: no fingerprints are taken.
        guard: makes a function that catches the errors of its body.
        modules: those of the model.
        reporter: is told of each fingerprint, with its table, and of what this rank finds alone.
    """

    events = (ForwardBegan, RootReturned, StepBegins, StepDone)

    def __init__(
        self,
        model: nn.Module,
        every: int,
        steps: OptimizerSteps,
        collectives: Collectives,
        *,
        guard: Callable[[Callable[..., None]], Callable[..., None]],
        modules: Modules,
        reporter: Reporter,
    ) -> None:
        self._root = unwrap(model)
        self._every = every
        self._steps = steps
        self._collectives = collectives
        self._modules = modules
        self._reporter = reporter
        self._loaded = guard(self._load)
        self._gathered = guard(self._gather)
        ddp = next((one for one in wrapped_in(model) if isinstance(one, DistributedDataParallel)), None)
        self._ddp: Callable[[], Any] = ref(ddp) if ddp is not None else lambda: None
        self._plan: Plan | None = None
        self._handles: dict[int, RemovableHandle] = {}
        self._gathers: list[RemovableHandle] = []
        self._first_era = era()
        self._era, self._began = 0, 0  # its number, and the optimizer steps done as it began
        self._last: _Ordinal | None = None
        self._unsure: FingerprintInProgress | None = None
        self._pending: deque[FingerprintInProgress] = deque()
        self._is_loaded = False
        self._is_local = False
        self._is_synchronised = True
        self._exchanges = 0
        self._shares_inputs = False
        self._unmoving = Unmoving(steps, reporter.on_notice)
        self._ties = Ties(self._root, modules if every else None, reporter.on_notice)
        if every:
            watch_joins()
            self._watch_loads()

    # --- events -------------------------------------------------------------------------------------------------------

    def on(self, event: ForwardBegan | RootReturned | StepBegins | StepDone) -> None:
        match event:
            case ForwardBegan(batch):
                self._forward_begins(batch)
            case RootReturned():
                self._root_returned()
            case StepBegins():
                self._step_begins(event.optimizer)
            case StepDone(optimizer, batch_number):
                with torch.no_grad():
                    self._unmoving.after_step(optimizer, batch_number)
                if self._every and self._steps.done == ALONE_EVERY:
                    self._look_for_others(batch_number)

    def _forward_begins(self, batch: BatchInProgress) -> None:
        """A forward of ``batch`` begins, and ``batch.entry`` has what the root was given, if it was called."""
        if not self._every or not batch.is_streamed:
            return
        self._see_ddp()
        self._forward_ends()
        self._exchanges = self._collectives.exchanges
        ordinal = self._ordinal()
        if ordinal == self._last:
            return
        with torch.no_grad(), torch.inference_mode(False):
            taken = self._take(ordinal, batch)
            self._ties.look(self._steps.number, batch.position.batch)
        self._unsure = taken
        self.flush()

    def _forward_ends(self) -> None:
        """Nothing is gathered any more for the forward that began last."""
        for taken in (self._unsure, *self._pending):
            if taken is not None:
                taken.close()
        self.flush()

    def _root_returned(self) -> None:
        """Ranks that exchange values in a forward may work on parts of one input, as where a sequence is divided."""
        plan = self._plan
        if plan is not None and not plan.exchanges and self._collectives.exchanges > self._exchanges:
            self._shares_inputs = True
        self._forward_ends()

    def _step_begins(self, optimizer: Optimizer) -> None:
        plan = self._plan
        self._is_local |= not self._is_synchronised or (plan is not None and not plan.is_synchronised)
        self._forward_ends()
        with torch.no_grad():
            self._unmoving.before_step(optimizer)

    def flush(self, *, wait: bool = False) -> None:
        """Sends what has come; ``wait``: all that was taken."""
        if self._unsure is not None and self._unsure.batch.is_sure:
            taken, self._unsure = self._unsure, None
            self._pending.append(taken)
            self._last = taken.ordinal
            self._is_loaded = False
        while self._pending and (wait or self._pending[0].is_ready):
            taken = self._pending.popleft()
            pairs = taken.pairs()
            self._unmoving.see(taken.rows, pairs)
            if taken.plan.is_shared:
                self._reporter.on_fingerprint(taken.plan.table, taken.finish(pairs))

    def remove(self) -> None:
        for handle in (*self._handles.values(), *self._gathers):
            handle.remove()
        self._handles.clear()
        self._gathers.clear()

    # --- one fingerprint ----------------------------------------------------------------------------------------------

    def _ordinal(self) -> _Ordinal:
        number = era() - self._first_era
        if number != self._era:
            self._era, self._began = number, self._steps.done
        return _Ordinal(number, self._steps.done - self._began)

    def _take(self, ordinal: _Ordinal, batch: BatchInProgress) -> FingerprintInProgress:
        before, plan = self._plan, self._plan
        if before is None:
            self._collectives.traffic = Traffic()
        signs = self._signs()  # before the traffic is read, which other threads change: then the plan is made anew
        if plan is None or not plan.still_holds(signs, ordinal.number % plan.slots):
            modules, traffic = self._modules.modules, self._collectives.traffic
            plan = Plan(
                self._root, self._ddp(), self._every, modules, self._ties.names, traffic, signs, is_first=before is None
            )
            self._plan = plan
            self._watch_loads()
            self._watch_gathers(plan)
            self._unmoving.begin(plan.parameters, modules, batch.position.batch)
            self._ties.begin(plan.parameters)
        is_whole = before is None or plan.table.id != before.table.id or self._is_loaded or ordinal.number <= ALL_UNTIL
        slot = ALL_ROWS if is_whole else ordinal.number % plan.slots
        alone = self._unmoving.parameters if is_whole or not ordinal.number % ALONE_EVERY else []
        return FingerprintInProgress(
            plan,
            batch,
            ordinal,
            self._steps.number,
            slot,
            plan.rows(slot) if plan.is_shared else alone,
            (self._is_loaded, self._is_local, self._communicates(plan)),
            has_inputs=plan.table.inputs is not None and not self._shares_inputs,
        )

    def _signs(self) -> Signs:
        ddp = self._ddp()
        modules, traffic = self._modules.modules, self._collectives.traffic
        return len(modules), id(ddp), len(comm_hooks_of(ddp)), world_size(), traffic[1:]

    def _see_ddp(self) -> None:
        active = active_ddp()
        if active is not None and active is not self._ddp():
            self._ddp = ref(active)
        ddp = self._ddp()
        self._is_synchronised = ddp is None or ddp.require_backward_grad_sync

    def _look_for_others(self, batch: int) -> None:
        """By now, ranks that torchrun has started have a way to talk to each other, or each trains a model of its own."""
        is_started = "TORCHELASTIC_RUN_ID" in os.environ and world_size() > 1
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if is_started and not has_group and self._plan is not None and not self._communicates(self._plan):
            about = class_name(self._root), "process group", ""
            self._reporter.on_notice(Notice(NoticeKind.ALONE, "", *about, batch, batch, float(world_size()), 0.0))

    def _communicates(self, plan: Plan) -> bool:
        return (
            self._collectives.traffic.has_talked
            or plan.has_dtensors
            or any(name in sys.modules for name in _UNSEEN)
            or has_rpc()
        )

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _watch_loads(self) -> None:
        modules = {named.number: named.module for named in self._modules.modules}
        for number in self._handles.keys() - modules.keys():  # of modules that were replaced
            self._handles.pop(number).remove()
        for number in modules.keys() - self._handles.keys():
            hook = _WithModule(self._loaded)
            self._handles[number] = modules[number].register_load_state_dict_post_hook(hook)

    def _load(self, module: nn.Module) -> None:
        self._is_loaded = True

    def _watch_gathers(self, plan: Plan) -> None:
        for handle in self._gathers:
            handle.remove()
        modules = {id(one.gather.module): one.gather.module for one in plan.parameters if one.gather is not None}
        self._gathers = [module.register_forward_pre_hook(_WithModule(self._gathered)) for module in modules.values()]

    def _gather(self, module: nn.Module) -> None:
        taken = self._unsure or (self._pending[-1] if self._pending else None)
        if taken is not None and taken.is_open:
            with torch.no_grad(), torch.inference_mode(False):
                taken.gather(module)


class _WithModule(OutsideOfGraph):
    """A hook that calls its body with the module."""

    def __call__(self, module: nn.Module, given: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            quietly(self._body, module)


class FingerprintInProgress:
    """The checksums of one fingerprint, on their way to the host. It is ``is_open`` while gathered values may be added.

    ``flags``: whether weights were loaded, whether gradients were not synchronised, and whether the ranks communicate.
    """

    def __init__(
        self,
        plan: Plan,
        batch: BatchInProgress,
        ordinal: _Ordinal,
        step: int,
        slot: int,
        rows: Sequence[LaidParameter],
        flags: tuple[bool, bool, bool],
        *,
        has_inputs: bool,
    ) -> None:
        self.plan = plan
        self.batch = batch
        self.ordinal = ordinal
        self._step = step
        self._slot = slot
        self._flags = flags
        self.rows = rows
        self._lanes = Lanes.of([parameter.own() for parameter in rows])
        self._awaited = plan.gathered(slot)
        self._gathers = Lanes(2 * sum(map(len, self._awaited.values())))
        self._has_gathered = False
        self._inputs = _checksums_of_inputs(batch) if has_inputs else None
        self.gather(batch.entry.module if batch.entry is not None else None)
        if not self._awaited:
            self.close()

    @property
    def is_open(self) -> bool:
        return bool(self._awaited)

    def gather(self, module: nn.Module | None) -> None:
        """A forward of ``module`` begins: what was gathered for it is in memory."""
        for number, parameter in self._awaited.pop(id(module), ()):
            gather = parameter.gather
            values = gather.find() if gather is not None else None
            own = parameter.own()
            if gather is None or values is None or own is None:
                continue
            self._has_gathered = True
            self._gathers.write([(2 * number, own.to(gather.dtype), gather.offset), (2 * number + 1, values, 0)])

    def close(self) -> None:
        self._awaited = {}
        for lanes in self._all:
            lanes.send()

    @property
    def is_ready(self) -> bool:
        return all(lanes.is_ready for lanes in self._all)

    @property
    def _all(self) -> list[Lanes]:
        return [lanes for lanes in (self._lanes, self._gathers, self._inputs) if lanes is not None]

    def pairs(self) -> list[Pair]:
        """The checksums of its rows."""
        return self._lanes.pairs()

    def finish(self, pairs: list[Pair]) -> Fingerprint:
        return Fingerprint(
            self.plan.table.id,
            *self.ordinal,
            self._step,
            self._slot,
            *self._flags,
            lanes=packed(pairs),
            gathers=packed(self._gathers.pairs()) if self._has_gathered else b"",
            inputs=packed([combined(self._inputs.pairs())]) if self._inputs is not None else b"",
        )


def _checksums_of_inputs(batch: BatchInProgress) -> Lanes | None:
    """Of what the root was given. Single numbers may well be the same on all ranks: a time, say."""
    given = [] if batch.entry is None else [value for value in batch.entry.given if value.numel() > 1][:MAX_INPUTS]
    return Lanes.of([beginning(value.detach()) for value in given]) if given else None
