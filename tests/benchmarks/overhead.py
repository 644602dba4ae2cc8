"""The cost of watching: whole training steps with and without it, side by side in one process.

    python tests/benchmarks/overhead.py [--small] [--json FILE] [--models t5,gpt2] [--modes bare,frame] [...]

Eight tables:
  steps    The time of a training step (forward, backward, AdamW, zero_grad) divided by the bare model's.
           Each mode has its own model from the same seed, watched from its first step to its last. In every round each mode
           does one step, in a shuffled order; a ratio compares two steps of one round. Watching has a cycle: the weights are
           measured in turn over 16 batches, and with every=N all else in one batch of N ("between" has only the others).
           The figure is the median at each
           step of the cycle, averaged over the cycle: a plain median would not see the cost of one step in 16. ("+-" is the
           standard error of the figure, q1 and q3 are the quartiles of all ratios.) "bare (again)" is a second bare model: its
           distance from 1 is the noise. Cyclic garbage is collected between the steps, never in them. At the end each model
           gets a nan, which its mode must detect, or its row is marked BLIND. "graphs" is the number of graphs that
           torch.compile made; "syncs" how often the host waits for CUDA in a step, as far as torch notices.
  memory   The peak of a process (CPU, eager only) or of the allocator (CUDA) in the same training, divided by the bare peak.
  parts    The host's time in what watches beside the readings, divided by that of the same steps: the look at the gradients
           before the optimizer's, also after clip_grad_norm_; the state of the root's entry, kept for a rerun; the look at
           the loss; the fingerprint, of a 16th of the parameters (the mean over the steps), and of all of them at each step. A
           fingerprint is taken as by a rank among others, but not sent. Far below the noise of "steps", and not part of a
           comparison: nothing of it is done twice. "all hooks" is the time in all of them, readings included; "between" those
           in a batch between two that are measured in full ("a rank alone": without the fingerprint, which has a bound of its
           own); "budget" the mean once K is known, of full batches and others.
  calls    The CPU time of the training thread that watching adds to a step, per call of a module: of small modules, where the
           model itself costs next to nothing. On one thread. As in "steps", a figure is the median at each step of the cycle,
           averaged over the cycle.
  budget   The time of a step once K is known, where all batches are measured and with a budget of 0.02, divided by the mean of
           two bare models' in the same round; "bare (again)" by that of the first one alone. With a budget the figure is the
           median of full batches and the median of others, by their share; K is in the row. The steps where all batches are
           measured count among the full ones. On the CPU it is CPU time of the training thread, on one thread, as in "calls":
           other work on the machine hardly reaches it.
  counted  The time of a collective in our wrapper of torch's method, in us, over that in the wrapper as it was before calls were
           counted; "to count" is over the same wrapper without counting. In turns, around a method that does nothing, while a
           model is watched. The figures are those of the fastest turns. The user is three frames away.
  measure  The time of rankwatch's measurement of one tensor, divided by the time of torch.aminmax. On a device also the
           bandwidth, as a share of that of a copy on the device, which reads and writes as many bytes.

The figures mean nothing on a machine with other work, above all with one thread per core: look at the noise first.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent")]

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models import DTYPES, EAGER, MODELS, MODES, WAYS, NotAvailable, Setting, Trainee, graphs_made, time_of
from benchmarks.small import SMALL, SmallTrainee
from peak import peak_bytes
from rankwatch.api import watch_object as watcher
from rankwatch.hook.backwards import Backwards
from rankwatch.hook.forwards import Forwards
from rankwatch.hook.loss import Losses
from rankwatch.hook.step.guard import Guard
from rankwatch.measure import collectives
from rankwatch.measure.counted import COUNTED, is_ours
from rankwatch.measure.extremes import Layout, Measure, TapeRow, layout_of
from rankwatch.measure.ledger import LEDGER
from rankwatch.replicas import fingerprints
from rankwatch.replicas import slots as plan
from rankwatch.replicas.fingerprints import FingerprintTaker
from rankwatch.rerun.forward import RootEntry
from rankwatch.touch.torch_private import GroupFacts

TABLES = ("steps", "parts", "memory", "calls", "budget", "counted", "measure")
FINGERPRINT, ALL_AT_ONCE, WHOLE = "fingerprint", "fingerprints=1", "all hooks"
ALONE = "a rank alone"
KIBI_ELEMENTS = (64, 256, 1024, 4096, 16384)
"""The tensors of the table "measure"."""
INTEGERS = {"int64": torch.int64, "bool": torch.bool}
"""On a device they are measured like floats."""


def target(setting: Setting, mode: str) -> float | None:
    """The upper limit for the ratio of step times."""
    if MODES[mode] is None or setting.model == "launches":
        return None
    if mode in ("every=10", "between"):
        return 1.005
    if setting.device == "cuda":
        return {"gradients": 1.10, "async": 1.01, "default": 1.02 if setting.way == EAGER else 1.01}.get(mode)
    if setting.way != EAGER:
        return 1.01
    return None if setting.model == "resnet" or mode == "gradients" else 1.03


def verdict(ratio: float, limit: float | None) -> str:
    """The last column."""
    if limit is None:
        return ""
    return f"<= {limit:g}: " + ("ok" if ratio <= limit else f"missed by {ratio - limit:.3f}")


# --- the tables -------------------------------------------------------------------------------------------------------

Line = dict[str, Any]


def table_of_steps(setting: Setting, modes: list[str], rounds: int) -> list[Line]:
    print(f"\n{setting}, {rounds} rounds", flush=True)
    print(f"  {'steps':<14}{'ms':>9}{'ratio':>9}{'+-':>8}{'q1':>8}{'q3':>8}{'graphs':>8}{'syncs':>7}", flush=True)
    built, rows = [], []
    for mode in modes:
        try:
            built.append(Trainee(setting, mode))
        except Exception as error:  # noqa: BLE001, the other modes can go on
            rows.append(absent(setting, mode, error))
    trainees = []
    for trainee in built:
        try:
            trainee.warm_up()
            trainees.append(trainee)
        except Exception as error:  # noqa: BLE001
            rows.append(absent(setting, trainee.mode, error))
    if not trainees or trainees[0].mode != "bare":
        raise SystemExit("the bare model cannot be trained here")
    made = graphs_made()
    take_turns(trainees, rounds)
    if graphs_made() != made:
        print("  compiled while it was timed: the figures are wrong", flush=True)
    for trainee in trainees:
        if setting.device == "cuda":
            trainee.count_syncs()
        trainee.try_out()
        row = step_row(setting, trainee, trainees[0])
        rows.append(row)
        print(
            f"  {row['mode']:<14}{row['ms']:9.1f}{row['ratio']:9.4f}{row['error']:8.4f}{row['q1']:8.3f}{row['q3']:8.3f}"
            f"{row['graphs']:8}{row['syncs']:7}  {row['verdict']}",
            flush=True,
        )
    for trainee in built:
        trainee.close()
    return rows


def take_turns(trainees: Sequence[Trainee | SmallTrainee], rounds: int) -> None:
    """Each model does one step in every round, in an order that changes from round to round."""
    shuffle = random.Random(0).shuffle
    order = list(trainees)
    gc.collect()
    gc.freeze()  # else the collection before each step would scan all models
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for trainee in order:
                trainee.time_step()
    finally:
        gc.enable()
        gc.unfreeze()


def step_row(setting: Setting, trainee: Trainee, bare: Trainee) -> Line:
    ratios = [mine / its for mine, its in zip(trainee.seconds, bare.seconds, strict=True)]
    ratio = over_cycle(ratios, trainee.period)
    q1, _, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        **vars(setting),
        "mode": trainee.mode,
        "ms": 1000 * statistics.median(trainee.seconds),
        "ratio": ratio,
        "error": _error_of(ratios),
        "q1": q1,
        "q3": q3,
        "graphs": trainee.graphs,
        "syncs": trainee.syncs,
        "blind": trainee.blind,
        "verdict": "BLIND" if trainee.blind else verdict(ratio, target(setting, trainee.mode)),
        "seconds": trainee.seconds,
        "peak": trainee.peak,
    }


def _error_of(figures: list[float]) -> float:
    """The standard error of the median of a normal distribution, by the quartiles."""
    if len(figures) < 2:
        return 0.0
    q1, _, q3 = statistics.quantiles(figures, n=4, method="inclusive")
    return 0.93 * (q3 - q1) / math.sqrt(len(figures))


def over_cycle(figures: list[float], period: int) -> float:
    """The median at each place of the cycle, averaged over the cycle."""
    places = [figures[place::period] for place in range(min(period, len(figures)))]
    return statistics.fmean(map(statistics.median, places))


PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "guard": ((Guard, "_update_begins"),),
    "root's entry": ((RootEntry, "__init__"),),
    "loss": ((Losses, "_look"),),
    WHOLE: (
        *((Forwards, name) for name in ("_enter", "_leave", "_leave_root")),
        *((Backwards, name) for name in ("_before_step", "_after_step", "_backward_begins", "_backward_ends")),
        (Guard, "_arrive"),
    ),
    FINGERPRINT: ((FingerprintTaker, "on"),),
}


MODES_OF_PARTS = (
    ("default", False), ("default", True), (ALL_AT_ONCE, False), ("between", False), ("between", True), ("budget", False),
)  # fmt: skip
"""And whether the training clips its gradients."""


def table_of_parts(setting: Setting, rounds: int) -> list[Line]:
    print(f"  {'parts':<22}{'ms':>9}{'share':>9}{'q1':>9}{'q3':>9}", flush=True)
    rows = []
    full: Pairs = []
    for mode, clips in MODES_OF_PARTS:
        with ExitStack() as stack:
            # Alone, or without a collector, a rank has nothing to compare.
            for module in (plan, fingerprints):
                stack.enter_context(patch.object(module, "world_size", lambda: 2))
            stack.enter_context(patch.object(watcher, "replace", lambda config, **changes: config))
            spent = {name: stack.enter_context(timed(place)) for name, place in PARTS.items()}
            trainee = Trainee(setting, mode, clips=clips)
            trainee.warm_up(SETTLED if mode == "budget" else None)
            for seconds in spent.values():
                seconds[:] = [0.0]
            for _ in range(rounds):
                trainee.time_step()
                for seconds in spent.values():
                    seconds.append(0.0)
        every = every_of(trainee)
        trainee.close()
        if mode == "between":  # what a rank takes with others for its fingerprint has a bound of its own
            alone = [whole - taken for whole, taken in zip(spent[WHOLE], spent[FINGERPRINT], strict=True)]
            spent = {ALONE: alone, WHOLE: spent[WHOLE]}
        for name, seconds in spent.items():
            if name != {ALL_AT_ONCE: FINGERPRINT, "budget": WHOLE}.get(mode, name):
                continue
            shares = [part / step for part, step in zip(seconds, trainee.seconds, strict=False)]
            q1, share, q3 = statistics.quantiles(shares, n=4, method="inclusive")
            title = name + ", between" * (mode == "between") + ", clipped" * clips
            ms, limit = (
                1000 * statistics.median(seconds[:-1]),
                0.005 if name == ALONE else 0.007 if mode == "between" else None if name == WHOLE else 0.01,
            )
            if name == FINGERPRINT:  # a large parameter is due in one step of 16
                title = name + (", all" if mode == ALL_AT_ONCE else ", clipped" * clips)
                share, ms = over_cycle(shares, trainee.period), 1000 * over_cycle(seconds[:-1], trainee.period)
                limit = 0.01 if mode == ALL_AT_ONCE else 0.002
            if name == WHOLE and (mode, clips) == ("default", False):
                full = list(zip(seconds, trainee.seconds, strict=False))
            if mode == "budget":  # a full batch is one of many
                title, limit, pairs = f"{name}, budget", 0.02, list(zip(seconds, trainee.seconds, strict=False))
                full = full if every > 1 else []
                share, _ = _by_share(pairs, full, every, lambda part, step: part / step)
                ms, _ = _by_share(pairs, full, every, lambda part, step: 1000 * part)
            text = f"K {every}, " * (mode == "budget") + verdict(share, limit)
            rows.append({**vars(setting), "part": title, "ms": ms, "share": share, "q1": q1, "q3": q3, "verdict": text})
            print(f"  {title:<22}{ms:9.3f}{share:9.5f}{q1:9.5f}{q3:9.5f}  {text}", flush=True)
    return rows


@contextmanager
def timed(place: tuple[tuple[type, str], ...]) -> Iterator[list[float]]:
    """Adds the seconds in these methods to the last item of the list; those of a call within another one once."""
    spent = [0.0]
    depth = 0

    def timing(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            begin = time.perf_counter()
            depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1
                if not depth:
                    spent[-1] += time.perf_counter() - begin

        return method

    with ExitStack() as stack:
        for owner, name in place:
            stack.enter_context(patch.object(owner, name, timing(getattr(owner, name))))
        yield spent


def table_of_memory(setting: Setting, peaks: dict[str, int]) -> list[Line]:
    """``peaks``: bytes by mode, 0 where the mode is not available."""
    print(f"  {'memory':<14}{'MiB':>9}{'ratio':>9}{'more':>8}", flush=True)
    rows = []
    for mode, peak in peaks.items():
        if not peak:
            rows.append(absent(setting, mode, NotAvailable("")))
            continue
        more = peak - peaks["bare"]
        ratio = peak / peaks["bare"]
        text = verdict(ratio, None if MODES[mode] is None else 1.01)
        rows.append({**vars(setting), "mode": mode, "bytes": peak, "ratio": ratio, "verdict": text})
        print(f"  {mode:<14}{peak / 2**20:9.0f}{ratio:9.4f}{more / 2**20:8.1f}  {text}", flush=True)
    return rows


def peak_of_process(setting: Setting, mode: str, threads: int) -> int:
    """The peak of a separate process that trains for some steps in this mode; 0 if it cannot."""
    command = [sys.executable, __file__, "--peak-of", mode, "--models", setting.model, "--dtypes", setting.dtype]
    command += ["--threads", str(threads), "--device", "cpu", *["--small"] * (setting.size == "small")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return int(done.stdout) if done.returncode == 0 else 0


def train_and_tell_peak(setting: Setting, mode: str) -> None:
    """The body of this process."""
    try:
        trainee = Trainee(setting, mode)
    except NotAvailable:
        raise SystemExit(1) from None
    for _ in range(2):
        trainee.warm_up()
    print(peak_bytes())


def table_of_measuring(size: str, device: str, rounds: int) -> list[Line]:
    print(f"\none tensor, {device}, {rounds} rounds", flush=True)
    print(f"  {'measure':<22}{'us':>9}{'aminmax':>9}{'ratio':>9}{'q1':>8}{'q3':>8}", flush=True)
    rows = []
    for name, dtype in (DTYPES | INTEGERS if device == "cuda" else DTYPES).items():
        for kibi in KIBI_ELEMENTS[: 1 if size == "small" else None]:
            values = torch.randn(1024 * kibi, device=device).to(dtype)
            ours, theirs = partial(measure_once, values), partial(torch.aminmax, values)
            repeats = max(1, 4096 // kibi)
            for action in (ours, theirs):
                time_of(action, device == "cuda", repeats)
            pairs = [[time_of(action, device == "cuda", repeats) for action in (ours, theirs)] for _ in range(rounds)]
            ratios = [our_time / their_time for our_time, their_time in pairs]
            ratio = statistics.median(ratios)
            q1, _, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
            share = share_of_copy(values, ours, repeats, rounds) if device == "cuda" else None
            us, aminmax = (1e6 * statistics.median(times) for times in zip(*pairs, strict=True))
            row = {"device": device, "dtype": name, "elements": 1024 * kibi, "us": us, "aminmax": aminmax}
            rows.append({**row, "ratio": ratio, "q1": q1, "q3": q3, "verdict": verdict(ratio, 2.0), "share of copy": share})
            more = "" if share is None else f", {share:.0%} of a copy's bandwidth"
            text = f"{verdict(ratio, 2.0)}{more}"
            print(f"  {f'{name}, {kibi} Ki':<22}{us:9.1f}{aminmax:9.1f}{ratio:9.3f}{q1:8.3f}{q3:8.3f}  {text}", flush=True)
    return rows


def share_of_copy(values: Tensor, ours: Callable[[], None], repeats: int, rounds: int) -> float:
    """The bytes that our measurement reads a second, divided by those that a copy on the device reads and writes."""
    copy = partial(torch.empty_like(values).copy_, values)
    pairs = [[time_of(action, True, repeats) for action in (ours, copy)] for _ in range(rounds)]
    return statistics.median([its / (2 * mine) for mine, its in pairs])


MEASURE = Measure()
ROWS: dict[tuple[torch.device, Layout], TapeRow] = {}


def measure_once(values: Tensor) -> None:
    """Measures abs min and abs max of ``values`` as a hook does, without the read-back."""
    layout = layout_of(values)
    row = ROWS.get((values.device, layout))
    if row is None:
        both = torch.zeros(2, dtype=layout.written, device=values.device)
        row = TapeRow(both[0], both[1], both)
        if values.is_cpu and layout.written is not layout.read:
            numbers = both.view(layout.read)
            row = row._replace(numbers=(numbers[0], numbers[1]))
        ROWS[values.device, layout] = row
    MEASURE(values, row, layout)


MODES_OF_CALLS = ("bare", "bare (again)", "default", "batch", "async", "every=10", "between", "gradients")


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@one_thread()
def table_of_calls(rounds: int) -> list[Line]:
    rows: list[Line] = []
    for small in SMALL:
        print(f"\n{small.title}, {small.way}, {rounds} rounds, CPU time of one thread", flush=True)
        print(f"  {'calls':<14}{'us':>9}{'ratio':>9}{'q1':>8}{'q3':>8}", flush=True)
        x = torch.randn(small.shape)
        trainees = {mode: SmallTrainee(small.build, x, mode, small.way) for mode in MODES_OF_CALLS}
        for trainee in trainees.values():
            trainee.warm_up()
        calls = sum(1 for _ in trainees["bare"].model.modules())
        take_turns(list(trainees.values()), rounds)
        bare = trainees["bare"].seconds
        for mode, trainee in trainees.items():
            more = [1e6 * (mine - its) / calls for mine, its in zip(trainee.seconds, bare, strict=True)]
            ratios = [mine / its for mine, its in zip(trainee.seconds, bare, strict=True)]
            us, ratio = over_cycle(more, trainee.period), over_cycle(ratios, trainee.period)
            q1, _, q3 = statistics.quantiles(more, n=4, method="inclusive")
            text = verdict(us, small.most.get(mode)) + verdict(ratio, small.largest.get(mode))
            row = {"model": small.title, "way": small.way, "mode": mode, "us": us, "ratio": ratio, "q1": q1, "q3": q3}
            rows.append({**row, "verdict": text})
            print(f"  {mode:<14}{us:9.1f}{ratio:9.3f}{q1:8.1f}{q3:8.1f}  {text}", flush=True)
        for trainee in trainees.values():
            trainee.close()
        torch.compiler.reset()
    return rows


SETTLED = 40
"""Steps under a budget before any is timed: by then K is known."""

MODES_OF_BUDGET = ("bare", "bare (again)", "default", "budget")


@one_thread()
def table_of_budget(
    title: str, make: Callable[[str], Trainee | SmallTrainee], rounds: int, largest: float | None, calls: int = 1
) -> list[Line]:
    """``largest``: the limit of the ratio; None: that of a call is 10 us. ``calls``: of modules, in a step."""
    print(f"\n{title}, {rounds} rounds\n  {'budget':<14}{'ratio':>9}{'+-':>8}{'us a call':>11}{'K':>5}", flush=True)
    trainees = {mode: make(mode) for mode in MODES_OF_BUDGET}
    for mode, trainee in trainees.items():
        trainee.warm_up(SETTLED if mode == "budget" else None)
    take_turns(list(trainees.values()), rounds)
    bare, again = (trainees[mode].seconds for mode in MODES_OF_BUDGET[:2])
    both = [statistics.fmean(pair) for pair in zip(bare, again, strict=True)]  # half the variance of one
    pairs = {
        mode: list(zip(one.seconds, bare if mode in MODES_OF_BUDGET[:2] else both, strict=True))
        for mode, one in trainees.items()
    }
    rows = list[Line]()
    for mode, trainee in trainees.items():
        every = every_of(trainee) if mode == "budget" else 1
        full = pairs["default"] if every > 1 else []
        ratio, error = _by_share(pairs[mode], full, every, lambda mine, its: mine / its)
        more, _ = _by_share(pairs[mode], full, every, lambda mine, its: 1e6 * (mine - its) / calls)
        text = "" if mode != "budget" else verdict(more, 10.0) if largest is None else verdict(ratio, largest)
        row = {"title": title, "mode": mode, "ratio": ratio, "error": error, "us": more, "every": every, "verdict": text}
        rows.append({**row, "seconds": trainee.seconds})
        print(f"  {mode:<14}{ratio:9.4f}{error:8.4f}{more:11.2f}{every:5}  {text}", flush=True)
        trainee.close()
    return rows


def every_of(trainee: Trainee | SmallTrainee) -> int:
    """One of so many batches is measured in full."""
    return max(trainee.watch._detector.whereabouts.cost.every, 1) if trainee.watch is not None else 1


Pairs = Sequence[tuple[float, float]]


def _by_share(pairs: Pairs, full: Pairs, every: int, compare: Callable[[float, float], float]) -> tuple[float, float]:
    """The mean of all batches, of which one of ``every`` is full, and its standard error.

    Args:
        pairs: what steps took, each with what bare ones of its round did. The full ones have numbers that ``every`` divides.
        full: those where each batch was full.
    """
    own = [compare(*pair) for number, pair in enumerate(pairs, SETTLED) if number % every == 0]
    others = [compare(*pair) for number, pair in enumerate(pairs, SETTLED) if number % every]
    weighed = [([*own, *itertools.starmap(compare, full)], 1 / every), (others, 1 - 1 / every)]
    mean = sum(statistics.median(same) * share for same, share in weighed if same)
    return mean, math.hypot(*[_error_of(same) * share for same, share in weighed if same])


MOST_OVER_BEFORE = 1.0
"""Microseconds that a collective may take longer than before calls were counted. One of two ranks on one host takes a hundred."""


class _Listener:
    """A watched model in whose forwards and backwards the collective is not."""

    def hears(self, method: str) -> bool:
        return False

    def is_watched(self) -> bool:
        return False


def _as_before(original: Callable[..., Any], heard: weakref.WeakSet[_Listener]) -> Callable[..., Any]:
    """The wrapper of before: it knew the models in a WeakSet, and no ledger."""

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        everyone = tuple(heard) if heard and not is_ours() else ()
        for listener in everyone:
            if listener.hears("") and self.size() > 1:
                raise AssertionError("it is not in a forward")
        if not [listener for listener in everyone if listener.is_watched()]:
            return original(self, *args, **kwargs)
        raise AssertionError("it is not in a forward")

    return observed


def table_of_counting(rounds: int) -> list[Line]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    group = dist.group.WORLD
    LEDGER.meet(group, GroupFacts("0", "", (0, 1), is_default=True, has_two_orders=True))  # as where there are devices
    x = torch.zeros(4096)
    calls: dict[str, tuple[Any, ...]] = {
        "allreduce": ([x], dist.AllreduceOptions()),
        "broadcast": ([x], dist.BroadcastOptions()),
        "_allgather_base": (x, x, None),
        "alltoall_base": (x, x, [], [], None),
    }
    print(f"\n  {'counted':<26}{'over before':>12}{'to count':>10}", flush=True)
    listener, rows = _Listener(), list[Line]()
    for method, args in calls.items():
        before = _as_before(_nothing, weakref.WeakSet([listener]))
        counting = collectives._observed(method, _nothing)
        with patch.object(collectives, "COUNTED", {}):
            plain = collectives._observed(method, _nothing)
        fastest = {before: math.inf, plain: math.inf, counting: math.inf}
        with patch.object(collectives, "_hearing", (weakref.ref(listener),)):
            for wrapper in [*fastest] * max(rounds, 8):
                begin = time.perf_counter()
                for _ in range(200):
                    _call_below(wrapper, group, args, 2)
                fastest[wrapper] = min(fastest[wrapper], (time.perf_counter() - begin) / 200)
        over, us = (1e6 * (fastest[counting] - fastest[other]) for other in (before, plain))
        kind = COUNTED[method].kind
        rows.append({"kind": kind, "us": us, "over_before": over, "verdict": verdict(over, MOST_OVER_BEFORE)})
        print(f"  {kind:<26}{over:12.2f}{us:10.2f}  {rows[-1]['verdict']}", flush=True)
    dist.destroy_process_group()
    return rows


def _nothing(*_: Any) -> None:
    """What a collective does here."""


def _call_below(wrapper: Callable[..., Any], group: Any, args: tuple[Any, ...], frames: int) -> None:
    if frames:
        _call_below(wrapper, group, args, frames - 1)
    else:
        wrapper(group, *args)


def absent(setting: Setting, mode: str, error: Exception) -> Line:
    reason = str(error) if isinstance(error, NotAvailable) else repr(error)
    print(f"  {mode:<14}{'n/a':>9}  {reason.partition(chr(10))[0][:90]}", flush=True)
    return {**vars(setting), "mode": mode, "absent": reason}


# --- the command ------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_list(name: str, known: Iterable[str], default: Iterable[str]) -> None:
        def split(text: str) -> list[str]:
            unknown = set(text.split(",")) - set(known)
            if unknown:
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: none of {', '.join(known)}")
            return text.split(",")

        parser.add_argument(name, type=split, default=list(default), help=f"of {','.join(known)}")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    add_list("--tables", TABLES, TABLES)
    add_list("--models", MODELS, ["gpt2"] if device == "cuda" else [model for model in MODELS if model != "launches"])
    add_list("--dtypes", DTYPES, ["bfloat16"] if device == "cuda" else ["float32", "bfloat16"])
    add_list("--modes", MODES, [mode for mode in MODES if mode not in ("default", "gradients", ALL_AT_ONCE, "budget")])
    add_list("--ways", WAYS, WAYS[:2])
    parser.add_argument("--steps", type=int, default=48, help="rounds; three cycles of 16 by default")
    parser.add_argument("--threads", type=int, help="all cores; 1 with --small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that all works")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.threads = arguments.threads or (1 if arguments.small else os.cpu_count())
    return arguments


def main() -> None:
    arguments = parse()
    for variable in [name for name in os.environ if name.startswith(("RANKWATCH_", "TORCHELASTIC_"))]:
        del os.environ[variable]  # only its arguments define a mode
    torch.set_num_threads(arguments.threads)
    device, size = arguments.device, "small" if arguments.small else arguments.device
    if arguments.peak_of:
        train_and_tell_peak(Setting(arguments.models[0], size, device, arguments.dtypes[0], EAGER), arguments.peak_of)
        return
    if device == "cuda":  # allocates now what the first model would allocate for all later ones
        Trainee(Setting(arguments.models[0], "small", device, "bfloat16", EAGER), "bare").warm_up()
    name = torch.cuda.get_device_name() if device == "cuda" else f"threads: {arguments.threads}"
    load = os.getloadavg()[0]
    print(
        f"torch {torch.__version__}, {device}, {name}, {os.cpu_count()} cores with a load of {load:.1f} before", flush=True
    )
    given = {name: str(value) for name, value in vars(arguments).items()}
    about = {"torch": torch.__version__, "machine": name, "load": load, "arguments": given}
    results: dict[str, Any] = {"about": about, **{table: [] for table in TABLES}}
    modes = ["bare", *(mode for mode in arguments.modes if mode != "bare")]
    settings = itertools.product(arguments.models, [size], [device], arguments.dtypes, arguments.ways)
    for setting in itertools.starmap(Setting, settings):
        rows = table_of_steps(setting, modes, arguments.steps) if "steps" in arguments.tables else []
        results["steps"] += rows
        if "parts" in arguments.tables and setting.way == EAGER:
            results["parts"] += table_of_parts(setting, arguments.steps)
        if "budget" in arguments.tables:
            make = partial(Trainee, setting, clock=time.thread_time if device == "cpu" else time.perf_counter)
            results["budget"] += table_of_budget(str(setting), make, arguments.steps, 1.02)
        gc.collect()  # the models
        torch.compiler.reset()
        if "memory" in arguments.tables and not (device == "cpu" and setting.way != EAGER):
            peaks = {row["mode"]: row.get("peak", 0) for row in rows}
            if device == "cpu":
                peaks = {mode: peak_of_process(setting, mode, arguments.threads) for mode in modes if mode != "hugging face"}
            results["memory"] += table_of_memory(setting, peaks)
    if "calls" in arguments.tables and device == "cpu":
        results["calls"] = table_of_calls(arguments.steps)
    if "budget" in arguments.tables and device == "cpu":
        for small, largest in zip(SMALL, (None, 1.05), strict=False):
            calls = sum(1 for _ in small.build().modules())
            make_small = partial(SmallTrainee, small.build, torch.randn(small.shape), way=small.way)
            results["budget"] += table_of_budget(small.title, make_small, 4 * arguments.steps, largest, calls)
    if "counted" in arguments.tables:
        results["counted"] = table_of_counting(arguments.steps)
    if "measure" in arguments.tables:
        results["measure"] = table_of_measuring(size, device, arguments.steps)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))
    if any(row.get("blind") for row in results["steps"]):
        raise SystemExit("a mode missed the nan, or saw one that was not asked to look: see BLIND above")


if __name__ == "__main__":
    main()
