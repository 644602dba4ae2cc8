"""How the kernel is compiled and launched, on a GPU that is not there: see ``no_gpu``."""

from __future__ import annotations

import gc
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from rankwatch.measure import kernel

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("triton interprets here, and launches nothing", allow_module_level=True)

from no_gpu import NoGpu  # noqa: E402


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


@pytest.mark.parametrize("words", [0, kernel.WORDS_PER_ROW], ids=["alone", "with the checksum"])
@pytest.mark.parametrize("dtype", kernel._FORMATS, ids=str)
def test_one_program_per_dtype_with_wide_loads(gpu: NoGpu, dtype: torch.dtype, words: int) -> None:
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
        assert registers_of(ptx) <= 40  # see kernel._PROGRAMS_PER_SM


def registers_of(ptx: str) -> int:
    """Of a thread."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    (chip,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    command = [program, "-v", "--gpu-name", chip, "-o", os.devnull, "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True)
    return int(re.findall(r"Used (\d+) registers", done.stderr)[0])
