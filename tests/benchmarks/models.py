"""The models that overhead.py trains, of well-known shapes with random weights, and the modes of watching."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.debug_utils import DebugUnderflowOverflow

import rankwatch

transformers.logging.set_verbosity_error()

SIZES = ("small", "cpu", "cuda")
"""For a smoke test, for steps of a second or two on two cores, and for a busy GPU."""
EAGER, COMPILED, REDUCED = WAYS = ("eager", "compiled", "reduce-overhead")
"""How a model is called; the last one is torch.compile's mode of CUDA graphs."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "bare (again)": None,
    "hugging face": None,
    "default": {},
    "frame": {"check": "frame"},
    "batch": {"check": "batch"},
    "async": {"check": "async"},
    "gradients": {"gradients": True},
    "every=10": {"every": 10},
    "between": {"every": 10**6},
    "no guard": {"guard": False},
    "fingerprints=1": {"fingerprints": 1},
    "skip": {"on_bad_step": "skip"},
    "budget": {"budget": 0.02},
}
"""Each mode, with the arguments of watch() where rankwatch watches: each batch is measured in full but with ``every``, or under a
budget. ``between``: in no batch that is timed is more than the root looked at."""


def arguments_of(mode: str) -> dict[str, Any]:
    given = MODES[mode] or {}
    return given if "budget" in given or "every" not in WATCH_PARAMETERS else {"every": 1, **given}


WATCH_PARAMETERS = inspect.signature(rankwatch.watch).parameters
WEIGHTS_EVERY: int = WATCH_PARAMETERS["weights_every"].default if "weights_every" in WATCH_PARAMETERS else 1


@dataclass(frozen=True)
class Workload:
    """Makes a model and its input batch; the model returns the loss, or an output that has one."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]


def t5(size: str) -> Workload:
    """T5-small's shape."""
    rows, length = {"small": (2, 8), "cpu": (4, 128), "cuda": (32, 512)}[size]
    shape = {"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6, "vocab_size": 32128}
    if size == "small":
        shape = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 128}
    config = transformers.T5Config(**shape, decoder_start_token_id=0, use_cache=False)

    def batch() -> dict[str, Tensor]:
        return {name: torch.randint(2, shape["vocab_size"], (rows, length)) for name in ("input_ids", "labels")}

    return Workload(f"T5-small's shape, {rows} x {length} tokens", _maker("T5ForConditionalGeneration", config), batch)


def gpt2(size: str) -> Workload:
    """GPT-2's shape, GPT-2-medium's on a GPU."""
    rows, length = {"small": (2, 8), "cpu": (2, 128), "cuda": (8, 1024)}[size]
    shape = {
        "small": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0},
        "cpu": {"n_embd": 768, "n_layer": 12, "n_head": 12},
        "cuda": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    }[size]
    config = transformers.GPT2Config(**shape, use_cache=False)

    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(2, config.vocab_size, (rows, length))
        return {"input_ids": tokens, "labels": tokens}

    name = "GPT-2-medium" if size == "cuda" else "GPT-2"
    return Workload(f"{name}'s shape, {rows} x {length} tokens", _maker("GPT2LMHeadModel", config), batch)


def resnet(size: str) -> Workload:
    """ResNet-50's shape."""
    rows, side = {"small": (2, 32), "cpu": (16, 128), "cuda": (128, 224)}[size]
    width, depths = (8, (1, 1, 1, 1)) if size == "small" else (64, (3, 4, 6, 3))

    def batch() -> dict[str, Tensor]:
        return {"images": torch.randn(rows, 3, side, side), "labels": torch.randint(1000, (rows,))}

    return Workload(f"ResNet-50's shape, {rows} x {side} x {side} pixels", lambda: ResNet(width, depths), batch)


def launches(size: str) -> Workload:
    """So many small modules that the device waits for the host."""
    modules, rows, width = {"small": (20, 2, 8), "cpu": (200, 4, 16), "cuda": (2000, 64, 64)}[size]

    def batch() -> dict[str, Tensor]:
        return {"x": torch.randn(rows, width)}

    return Workload(f"{modules} linear layers of {width}, {rows} rows", lambda: Launches(modules, width), batch)


MODELS: dict[str, Callable[[str], Workload]] = {"t5": t5, "gpt2": gpt2, "resnet": resnet, "launches": launches}


def _maker(name: str, config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = getattr(transformers, name)(config)
        return model

    return make


class Launches(nn.Module):
    """One small layer after another; the output is the loss."""

    def __init__(self, modules: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(modules)])

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).float().square().mean()
        return loss


class Experts(nn.Module):
    """A mixture of experts: each token goes through the two that its router prefers. Adds what they return to its input."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)]
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        shares, chosen = self.router(normed).softmax(-1).topk(2, -1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            is_chosen = chosen == number
            rows = is_chosen.any(-1)
            if rows.any():
                made[rows] += expert(normed[rows]) * (shares * is_chosen).sum(-1)[rows].unsqueeze(-1)
        return x + made


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, wide: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide, narrow, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(narrow)
        self.conv3 = nn.Conv2d(narrow, 4 * narrow, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * narrow)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or wide != 4 * narrow:
            conv = nn.Conv2d(wide, 4 * narrow, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * narrow))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        shortcut = x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(y + shortcut)
        return result


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks, classifier and loss."""

    def __init__(self, width: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stages = nn.Sequential()
        wide = width
        for stage, depth in enumerate(depths):
            narrow = width * 2**stage
            blocks = [Bottleneck(wide if i == 0 else 4 * narrow, narrow, 2 if i == 0 and stage else 1) for i in range(depth)]
            self.stages.append(nn.Sequential(*blocks))
            wide = 4 * narrow
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(wide, 1000)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.pool(self.stages(self.stem(images))).flatten(1)
        loss: Tensor = self.loss(self.classify(features), labels)
        return loss


# --- a model in training -----------------------------------------------------------------------------------------------


def period_of(mode: str) -> int:
    every: int = (MODES[mode] or {}).get("every", WEIGHTS_EVERY)
    return every if every <= WEIGHTS_EVERY else 1


class NotAvailable(Exception):
    """This mode is not available on this machine; the text says why."""


@dataclass(frozen=True)
class Setting:
    """The setting in which the modes are compared."""

    model: str
    size: str
    device: str
    dtype: str
    way: str

    @property
    def workload(self) -> Workload:
        return MODELS[self.model](self.size)

    def __str__(self) -> str:
        return f"{self.workload.title}, {self.dtype}, {self.way}, {self.device}"


class Trainee:
    """The model of one mode in training, and the times of its steps.

    Warm up after all models are made, and close after all are done: opening or closing a watch makes torch.compile forget
    what it compiled, for every model.
    """

    def __init__(
        self, setting: Setting, mode: str, *, clips: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.mode = mode
        self._clips = clips
        self._clock = clock
        self.period = period_of(mode)
        """The number of steps after which the cost of watching repeats, near enough."""
        self.seconds: list[float] = []
        self.peak = 0  # bytes, on CUDA
        self.graphs = self.syncs = 0
        self.blind = False
        self._is_cuda = setting.device == "cuda"
        before = self._allocated()
        torch.manual_seed(0)
        dtype = DTYPES[setting.dtype]
        model = setting.workload.build().to(setting.device, dtype).train()
        batch = setting.workload.batch().items()
        self._batch = {key: value.to(setting.device, dtype if value.is_floating_point() else None) for key, value in batch}
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-5)
        self._guard = open_guard(model, setting, mode)
        is_compiled = setting.way != EAGER
        self._call = compiled(model, setting.way) if is_compiled else model
        self._warm_ups = self.period + 2 if is_compiled else 3  # by then rarely compiled code is compiled too
        self._held = self._allocated() - before

    def warm_up(self, steps: int | None = None) -> None:
        before, made = self._allocated(), graphs_made()
        for _ in range(steps or self._warm_ups):
            self.step()
        self.graphs = graphs_made() - made
        self._held += self._allocated() - before

    def step(self) -> None:
        output = self._call(**self._batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def time_step(self) -> None:
        gc.collect()
        before = self._allocated()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self.seconds.append(time_of(self.step, self._is_cuda, clock=self._clock))
        if self._is_cuda:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - before + self._held)

    def count_syncs(self) -> None:
        """Counts how often a step waits for the GPU. (If torch raised instead, a watch would catch it and switch itself off.)"""
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.syncs = sum("synchronizing" in str(warning.message) for warning in caught)

    def try_out(self) -> None:
        """Puts nan into the weights: a watching mode must raise, any other must not. This is the last training."""
        with torch.no_grad():
            self._parameters[0].fill_(torch.nan)
        watches = self._guard is not None
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the report
                for _ in range(2 * self.period if watches else 1):
                    self.step()
            self.blind = watches
        except ValueError:  # OverflowDetected is one, and the Hugging Face detector raises no other
            self.blind = not watches

    @property
    def watch(self) -> rankwatch.Watch | None:
        return self._guard if isinstance(self._guard, rankwatch.Watch) else None

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._is_cuda else 0


def open_guard(model: nn.Module, setting: Setting, mode: str) -> Any:
    """The model's guard in this mode: a watch, the Hugging Face detector, or nothing."""
    arguments = MODES[mode]
    if mode == "hugging face":
        if setting.way != EAGER:
            raise NotAvailable("for eager models only")
        return DebugUnderflowOverflow(model)
    if arguments is None:
        return None
    unknown = arguments.keys() - WATCH_PARAMETERS.keys()
    if unknown:
        raise NotAvailable(f"watch() has no argument {', '.join(unknown)}")
    return rankwatch.watch(model, **arguments_of(mode))


def compiled(model: nn.Module, way: str) -> Any:
    """The compiled model. Code compiled for one mode must not serve another: by default no guard checks the hooks."""
    options: dict[str, Any] = {"mode": way} if way == REDUCED else {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    else:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch._dynamo.config.cache_size_limit = 8 * len(MODES)
    return torch.compile(model, **options)


def graphs_made() -> int:
    """The number of graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def time_of(
    action: Callable[[], object], is_cuda: bool, repeats: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds per call of ``action``."""
    if is_cuda:
        torch.cuda.synchronize()
    start = clock()
    for _ in range(repeats):
        action()
    if is_cuda:
        torch.cuda.synchronize()
    return (clock() - start) / repeats
