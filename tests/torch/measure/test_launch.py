"""How the kernel is compiled and launched, on a GPU that is not there: see ``no_gpu``."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rankwatch.measure import kernel

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("triton interprets here, and launches nothing", allow_module_level=True)

from no_gpu import STREAM, NoGpu  # noqa: E402

VALUES = torch.ones(40_000)
CELLS, LANES = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
QUICK = {(torch.float32, 0), (torch.bfloat16, kernel.WORDS_PER_ROW)}
PROGRAMS = [
    pytest.param(dtype, words, marks=() if (dtype, words) in QUICK else pytest.mark.slow)
    for dtype, words in product(kernel._FORMATS, (0, kernel.WORDS_PER_ROW))
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[NoGpu]:
    driver, gpu = triton.runtime.driver, NoGpu()
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", gpu)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_DEVICE", "cpu")
        patch.setattr(kernel, "_launches", {})
        for name in ("_kernel", "_most_programs"):
            patch.setattr(kernel, name, cache(getattr(kernel, name).__wrapped__))
        yield gpu
    gc.collect()  # compiled kernels are unloaded by the driver that is active


def built(dtype: torch.dtype, sums: bool = False) -> kernel._Launch:
    launch = kernel._launch_of(VALUES.device, dtype, sums)
    assert launch is not None
    return launch


def launched(gpu: NoGpu, launch: kernel._Launch, values: Tensor = VALUES) -> tuple[Any, ...]:
    gpu.launches.clear()
    launch(values, CELLS, LANES)
    (arguments,) = gpu.launches
    return arguments


@contextmanager
def profiler(hook: Callable[..., None]) -> Iterator[None]:
    """Sets the hook that triton calls before each launch."""
    holder = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel
    chain = holder.launch_enter_hook
    if chain is None:
        holder.launch_enter_hook = hook
    else:
        chain.add(hook)
    try:
        yield
    finally:
        if chain is None:
            holder.launch_enter_hook = None
        else:
            chain.remove(hook)


def hooks_of(arguments: tuple[Any, ...]) -> list[Any]:
    return [call for hook in arguments[5:7] for call in getattr(hook, "calls", [hook]) if call is not None]


@pytest.mark.parametrize(("dtype", "sums"), [(torch.float32, False), (torch.bool, False), (torch.int64, True)], ids=str)
def test_a_direct_launch_hands_over_what_triton_does(gpu: NoGpu, dtype: torch.dtype, sums: bool) -> None:
    directly, by_triton, values = built(dtype, sums), kernel._Launch(VALUES.device, dtype, sums), VALUES.to(dtype)
    assert directly.direct is not None
    ours, theirs = launched(gpu, directly, values), launched(gpu, by_triton, values)
    assert ours[:4] == theirs[:4]  # the grid, the stream, the function and its metadata
    assert (ours[1], hooks_of(ours), hooks_of(theirs)) == (STREAM, [], [])
    assert ours[7:] == theirs[7:]
    assert ours[7:11] == (values.data_ptr(), values.numel(), CELLS, LANES)


def test_a_profiler_sees_each_launch(gpu: NoGpu) -> None:
    launch = built(torch.float32)
    with profiler(print):
        assert hooks_of(launched(gpu, launch)) == [print]
        assert hooks_of(launched(gpu, built(torch.bool), VALUES.bool())) == [print]
    assert hooks_of(launched(gpu, launch)) == []
    assert launch.direct is not None


def test_triton_launches_a_kernel_that_cannot_be_called_directly(
    gpu: NoGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise TypeError("takes 11 arguments")

    monkeypatch.setattr(kernel._Direct, "launch", refuse)
    caplog.set_level(logging.INFO, kernel.__name__)
    for _ in range(3):
        assert launched(gpu, built(torch.float32))[7:11] == (VALUES.data_ptr(), VALUES.numel(), CELLS, LANES)
    assert [record.getMessage() for record in caplog.records] == [
        "launching the kernel for torch.float32 on cpu by triton: TypeError: takes 11 arguments"
    ]


@pytest.mark.parametrize(("dtype", "words"), PROGRAMS, ids=str)
def test_one_program_per_dtype_with_wide_loads(gpu: NoGpu, dtype: torch.dtype, words: int, tmp_path: Path) -> None:
    """For Hopper, and for any size and alignment; the interpreter cannot show this."""
    memory, programs = torch.zeros(8, dtype=torch.int64), set()
    for address, numel in product((16, 18, 1, 2**33, 2**47 + 2), (1, 2, 16, 17, 2**31, 2**33 + 1)):
        for cells in (memory[:2], memory[1:3], memory[2:4]):
            lanes = memory[4:] if words else cells
            constants = kernel._FORMATS[dtype], dtype.itemsize, kernel._ROWS, words
            compiled = kernel._kernel().warmup(address, numel, cells, lanes, *constants, num_warps=kernel._WARPS, grid=(1,))
            programs.add(compiled)
    (compiled,) = programs
    ptx = compiled.asm["ptx"]
    assert ptx.count("ld.global.v4.b32") + ptx.count("ld.global.v2.b64") == 2
    assert ptx.count(".ftz") == 0
    if not words:
        assert ptx.count("ld.global") == 3
        assert registers_of(compiled.asm["cubin"], tmp_path) <= 40  # see kernel._PROGRAMS_PER_SM


def registers_of(cubin: bytes, folder: Path) -> int:
    """Of a thread, in what a GPU would load. To assemble the PTX again would take the assembler that this triton took, of two."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary = folder / "kernel.cubin"
    binary.write_bytes(cubin)
    done = subprocess.run([program, "-res-usage", binary], capture_output=True, text=True, check=True)
    (registers,) = re.findall(r"\bREG:(\d+)", done.stdout)
    return int(registers)
