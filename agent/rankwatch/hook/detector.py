"""The detector: puts the parts together that watch one model, from its hooks to what is reported.

``forwards`` and ``backwards`` have what torch calls. They tell of events (``judge/events``), by which the other parts do their
work, in the order of the list in ``Detector``. ``lifecycle`` has which batch a frame belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ..errors import TrainingAborted
from ..judge.batch_limit import BatchLimit
from ..judge.events import Feed
from ..judge.lifecycle import Life
from ..judge.outside import Outside
from ..judge.pace.full_batches import PATIENCE, FullBatches
from ..judge.pace.hook_time import HookTime, laps_of
from ..judge.reporter import Reporter
from ..judge.settler import Settler
from ..judge.steps.growth import Growth
from ..judge.steps.optimizer_steps import OptimizerSteps
from ..judge.steps.rates import Rates
from ..judge.steps.writes import Writes
from ..judge.stopwatch import Stopwatch
from ..measure.collectives import Collectives
from ..measure.modules import unwrap
from ..measure.recorder import Recorder
from ..measure.sweep import Sweep
from ..measure.tape import Tape
from ..replicas.copies import Copies
from ..replicas.fingerprints import FingerprintTaker
from ..replicas.standstill import Standstill
from ..replicas.ungraded import Ungraded
from ..rerun.careful import passed_again
from ..shared.types.config import Config, Policy
from ..shared.types.frame import BatchSummary, FrameTable, Moment, Position, Whereabouts
from ..shared.types.tuning import Check, Tuning
from ..touch.parts import parameters_in
from . import backward
from .backwards import Backwards
from .batches import Batches
from .compiled.entry import CompiledEntry
from .fails_open import FailsOpen
from .forwards import Forwards
from .gradients import Gradients
from .hooks import Hooks
from .loss import BackwardWatch, Losses
from .running import RunningRoots
from .step.guard import Guard
from .step.scaler import LossScales
from .step.skipping import Skipping
from .turns import LossTurns
from .unwritten import Unwritten, remember_empty

log = logging.getLogger(__name__)

remember_empty()  # before a model is made


class Detector:
    """Watches ``model`` until ``remove``. ``whereabouts``, ``obey`` and ``tune`` may be used from other threads.

    An error of ours is logged once and switches the detector off: it never stops a healthy training.

    It keeps no wrapper of the model alive: the reducer of a DDP that the training has replaced would go on reducing.

    Args:
        count_all: as the Hugging Face detector does, count every root forward as a batch, not only those in training mode,
            add a module that is called between two batches to the second one, not the first, and look at no loss.
        judge_traced: judge traced batches too, at their end (the Hugging Face detector does not).
        sends_at_once: send a forward when it ends, not with its loss: the other stages of a pipeline are waited for.
        outside: what runs outside of all models of the process; None: nothing is known of that.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        reporter: Reporter,
        *,
        count_all: bool = False,
        judge_traced: bool = True,
        sends_at_once: bool = False,
        outside: Outside | None = None,
    ) -> None:
        self._outside = outside = outside or Outside()
        root, feed, tape = unwrap(model), Feed(), Tape()
        self._config = config
        full = FullBatches(config.every, _budget_of(config, count_all=count_all), PATIENCE if config.connection else 0.0)
        life = self._life = Life(config.first_batch, full, config.trace_batch_nums, sends_at_once=sends_at_once)
        self.use = life.use
        doors = self._doors = FailsOpen(config.stop, reporter, life, root)
        steps = self._steps = OptimizerSteps(root)
        recorder = self._recorder = Recorder(tape, 0 if config.policy is Policy.STRICT else config.weights_every)
        running = self._running = RunningRoots(root, feed)
        hooks = self._hooks = Hooks(model, config.modules, recorder, feed, doors)
        scales = self._loss_scales = LossScales(config, life, feed, doors)
        growth = Growth(hooks, steps, outside)
        sweep = Sweep(model, recorder, hooks)
        settler = self._settler = Settler(
            config,
            _default_check(model),
            life,
            tape,
            recorder,
            sweep,
            reporter,
            judge_traced=judge_traced,
            steps=steps,
            model=hooks,
            outside=outside,
            growth=growth,
        )
        undecided = settler.undecided
        batches = self._batches = Batches(life, settler, recorder, scales, steps, feed)
        collectives = self._collectives = Collectives(
            recorder, doors.guarded, is_watched=self._is_watched, is_measured=self._is_measured
        )
        turns = LossTurns(hooks)
        losses = self._losses = Losses(batches, scales, recorder, hooks, settler, turns)
        gradients = self._gradients = Gradients(
            config.gradients, batches, recorder, doors, model=hooks, collectives=collectives, losses=losses
        )
        skipping = Skipping(config.on_bad_step, hooks, life, undecided, steps)
        guard = self._guard = Guard(
            config,
            batches,
            settler,
            recorder,
            scales,
            steps,
            hooks,
            collectives,
            doors,
            full.noticing(reporter.on_notice),
            skipping,
        )
        fingerprints = self._fingerprints = FingerprintTaker(
            model,
            0 if count_all else config.fingerprints,
            steps,
            collectives,
            guard=doors.guarded,
            modules=hooks,
            reporter=reporter,
        )
        looks_at_weights = bool(config.fingerprints) and not count_all
        standstill = Standstill(hooks, steps, reporter.on_notice, is_on=looks_at_weights)
        ungraded = Ungraded(hooks, steps, reporter.on_notice, doors.guarded, is_on=looks_at_weights)
        copies = Copies(hooks, steps, is_on=not count_all)
        unwritten = Unwritten(hooks, reporter.on_notice)
        forwards = self._forwards = Forwards(
            count_all, doors, feed, running, batches, settler, recorder, sweep, steps, hooks, gradients, losses
        )
        backwards = Backwards(doors, feed, running, batches, steps, hooks, guard.stand_in, sees_losses=not count_all)
        limit = BatchLimit(config.abort_after_batch_num, life, settler, reporter)
        hooks.put_on(forwards, backwards)
        compiled = CompiledEntry(model, forwards)
        self._stopwatch, self._rates, self._writes = Stopwatch(), Rates(), Writes()
        feed.subscribe(
            copies, gradients, guard, skipping, batches, undecided, settler, hooks, losses, turns, scales, fingerprints,
            standstill, ungraded, unwritten, limit, forwards, compiled, outside, growth,
            self._stopwatch, self._rates, self._writes,
            HookTime(full, doors, laps_of(model), lambda: collectives.called, lambda: hooks.lean.is_on),
        )  # fmt: skip
        watch = BackwardWatch(backwards)
        self._removed = hooks, compiled, gradients, scales, watch, guard, fingerprints, collectives, ungraded
        self._look_back = doors.guarded(guard.look_back)
        doors.open()

    @property
    def root(self) -> nn.Module:
        """The watched module, without its wrappers."""
        return self._hooks.root

    @property
    def position(self) -> Position:
        """The position of the next frame."""
        return self._life.position

    @property
    def phase(self) -> str:
        return self._life.phase

    def await_training(self) -> None:
        """A forward before the training, of what is no data, is not judged."""
        self._settler.finder.awaits_training = True

    @property
    def whereabouts(self) -> Whereabouts:
        return self._life.whereabouts._replace(
            spent=self._stopwatch.spent, rates=self._rates.line, writes=self._writes.line, cost=self._life.full.cost
        )

    @property
    def progress(self) -> Moment:
        return self._life.progress

    @property
    def fault(self) -> str:
        """The internal error that switched the detector off; empty: it is on."""
        return self._doors.fault

    @property
    def optimizer_step(self) -> int:
        """The number of the optimizer step that comes next."""
        return self._steps.number

    @optimizer_step.setter
    def optimizer_step(self, number: int) -> None:
        self._steps.count_from(number)

    def unsent(self) -> tuple[FrameTable, BatchSummary] | None:
        """The last forward, if it is judged, and not sent yet: its loss is sent with it."""
        return self._settler.unsent()

    def tune(self, tuning: Tuning) -> None:
        """Changes options from the next forward on."""
        self._forwards.tune(tuning)

    def obey(self, abort: Callable[[], TrainingAborted | None]) -> None:
        """Has the next hook raise what ``abort`` returns, if it returns an exception."""
        self._doors.abort = abort
        self._hooks.wake()

    def look_back(self, error: BaseException) -> TrainingAborted | None:
        """An exception ends the training: see ``Guard.look_back``."""
        found: TrainingAborted | None = None if self._doors.is_off else self._look_back(error)
        return found

    def is_inside(self) -> bool:
        """Whether the calling thread is inside a watched forward."""
        return self._running.is_here() and not self._doors.is_off

    def mark(self, tensor: Tensor, label: str) -> None:
        """Records a tensor that the user marked, as a frame of its own under the name of the running module."""
        if not passed_again(label, ((), {}, tensor)):
            self._forwards.mark(tensor, label, self._hooks.running())

    def remove(self) -> None:
        """Takes all hooks away; the model is as it was. Pending frames are judged and sent, but nothing is raised."""
        self._doors.close()
        try:
            if not self.fault:  # first, as a batch may be run again with its hooks
                self._doors.guarded(self._batches.settle)()
                self._doors.guarded(self._settler.undecided.end_trial)()
                self._doors.guarded(self._guard.end)()
                self._doors.guarded(partial(self._fingerprints.flush, wait=True))()
        except TrainingAborted:
            log.debug("a trip was found as the watch was closed")
        finally:
            self._outside.end_batch()
            for part in self._removed:
                part.remove()

    def _is_watched(self) -> bool:
        """Whether what the calling thread does may be part of the watched training."""
        return not self._doors.is_off and self._running.is_watched()

    def _is_measured(self) -> bool:
        """Whether tensors of the forward or backward that runs are measured."""
        if self._running.depth or self._life.is_direct:
            return self._life.of_forward.is_full
        return self._config.gradients and backward.is_running() and self._life.of_backward.is_full


def _budget_of(config: Config, *, count_all: bool) -> float:
    """The share of a batch's time that watching may take; 0: each batch is measured in full, or each K-th, as ``every`` says."""
    wants_all = count_all or config.policy is Policy.STRICT or config.gradients or config.trace_batch_nums
    return 0.0 if wants_all else config.budget


def _default_check(model: nn.Module) -> Check:
    """On devices where reading a number waits for the device, numbers are read once a batch."""
    parameter = next(parameters_in(model), None)
    return Check.FRAME if parameter is None or parameter.device.type in ("cpu", "meta") else Check.BATCH
