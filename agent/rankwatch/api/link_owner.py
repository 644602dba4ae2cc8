"""A watch's link to the collector: made for a watch, and passed on to the next one of its model: the run goes on."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn

from ..rerun.capsule.gpu_name import gpu_of
from ..shared.link import connection as connections
from ..shared.system.identity import Identity, unnamed_job
from ..shared.system.resources import lack
from ..shared.types.config import Config
from ..shared.types.frame import Whereabouts
from ..shared.words.text import describe_rank
from ..tell import rank_process as seat
from ..tell.departure import DEPARTURE
from ..touch.parts import parameters_in
from ..touch.patched import patch, remove_our_frame
from .aside import aside, see_saves
from .made_with import made_with
from .registry import open_watches

if TYPE_CHECKING:  # imported with the first connection: without a collector, no zmq is needed
    from ..shared.types import messages
    from ..tell.link import Link, Linked

log = logging.getLogger(__name__)


class Speaker:
    """A link, and the watch that it speaks for. It keeps no unused watch, and so no model, alive.

    Args:
        model: the number of the model among those of this process.
    """

    link: Link

    def __init__(self, watch: Linked, model: int) -> None:
        self.model = model
        self._watch = weakref.ref(watch)
        self._tune: messages.Tune | None = None
        self._abort: messages.Abort | None = None
        self._passing_on = threading.Lock()
        self._end: weakref.finalize[[], Linked] | None = None

    def speak_for(self, watch: Linked) -> None:
        """From now on the link speaks for this watch, and ends with it."""
        if self._end is not None:
            self._end.detach()
        with self._passing_on:
            self._watch = weakref.ref(watch)
            tune, abort = self._tune, self._abort
        self._end = weakref.finalize(watch, self.link.release)
        self._end.atexit = False
        if tune is not None:  # it holds for the run
            watch.on_tune(tune)
        if abort is not None:  # it came as the watch before this one was taken off
            watch.on_abort(abort)

    # --- what the link's thread calls ---------------------------------------------------------------------------------

    def where(self) -> Whereabouts:
        watch = self._watch()
        return Whereabouts() if watch is None else watch.where()

    def on_abort(self, abort: messages.Abort) -> None:
        with self._passing_on:
            self._abort, watch = abort, self._watch()
        if watch is not None:
            watch.on_abort(abort)

    def on_stay(self, seconds: float) -> None:
        if (watch := self._watch()) is not None:
            watch.on_stay(seconds)

    def has_raised(self) -> bool:
        watch = self._watch()
        return watch is None or watch.has_raised()

    def on_tune(self, tune: messages.Tune) -> None:
        with self._passing_on:
            self._tune, watch = tune, self._watch()
        if watch is not None:
            watch.on_tune(tune)


def speaker_for(watch: Linked, model: nn.Module, config: Config, who: Identity, stage: int) -> Speaker | None:
    """A link to the collector of this connection file, or None where none can be made: the training goes on without it.

    Raises:
        RankwatchError: the connection file cannot be used, or the collector refuses this rank.
    """
    name = describe_rank(who.rank, who.world_size, who.host, who.local_rank, stage)
    why = lack()
    if not why:
        try:
            return _link_to(watch, model, config, who, stage, name)
        except (OSError, MemoryError, RuntimeError, SystemError) as error:  # of descriptors, memory or threads
            why = repr(error)
        except connections.OthersFileError as error:
            if "RANKWATCH_LAUNCH" not in os.environ:  # whoever named the file can name another one
                raise
            why = (
                f"{error}; the file is that of `rankwatch run`, and sudo, gosu or runuser made another user of this process"
            )
    log.warning("rankwatch: %s: no connection to the collector: %s; training goes on without it", name, why)
    return None


def distributed_group() -> tuple[int, int] | None:
    """Rank and world size in torch.distributed, if there is a process group."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _observing(original: Callable[..., Any]) -> Callable[..., Any]:
    def observed(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            remove_our_frame(error)
            raise
        finally:
            DEPARTURE.note(not torch.distributed.is_initialized())

    return observed


def _watch_group() -> None:
    for name in ("init_process_group", "destroy_process_group"):
        patch(torch.distributed, name, _observing)


def _link_to(watch: Linked, model: nn.Module, config: Config, who: Identity, stage: int, name: str) -> Speaker:
    from ..shared.link import wire
    from ..shared.types import messages
    from ..tell.agreement import start_of
    from ..tell.link import Link

    _watch_group()
    source = config.connection or ""
    device = next((parameter.device for parameter in parameters_in(model)), None)
    connection = connections.read(source)
    fixed = connection.job if connection.for_job_alone else ""
    taken = {other.model_number for other in open_watches()}
    speaker = Speaker(watch, next(number for number in count() if number not in taken))
    start = start_of(who, distributed_group(), fixed or who.job or connection.job or unnamed_job(who))
    hello = messages.Hello(
        *wire.VERSION,
        **asdict(replace(who, job=fixed or start.job, restart=start.restart)),
        device="none" if device is None else str(device),
        torch=torch.__version__,
        incarnation=os.urandom(8).hex(),
        stage=stage,
        gpu=gpu_of(device),
        start=start.id,
        model=speaker.model,
        launch=os.environ.get("RANKWATCH_LAUNCH", ""),
        earlier=start.earlier,
        made_with=made_with(config) if who.rank == 0 else (),
    )
    link = speaker.link = Link(connection, hello, speaker, source)
    if who.rank == 0:
        see_saves()
        link.aside = aside
    speaker.speak_for(watch)
    is_online = link.start()
    seat.take(who)
    if not is_online and not link.complaint:
        log.warning(
            "rankwatch: %s: no collector answers at %s; training goes on, and the background keeps trying. Is it running, "
            "of this same release, and the connection file its own? `rankwatch doctor` looks into it",
            name,
            connection.address,
        )
    return speaker
