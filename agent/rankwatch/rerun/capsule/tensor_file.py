"""Tensors in a file of the safetensors format: eight bytes of length, a JSON header, raw data. Reading it executes nothing.

The format is so small that no library is needed for it; the library reads these files as well.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_HEADER = 100_000_000
CHUNK = 16 << 20
"""Bytes between two looks at the clock."""

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "C64": "complex64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class OutOfTimeError(Exception):
    """Writing takes longer than it may."""


class BrokenTensorsError(Exception):
    """A file that is not of the format, or is cut short."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], until: float) -> str:
    """Writes a new file that only its owner can read; returns its SHA-256.

    A tensor of a dtype that the format does not have becomes the bytes of its numbers.

    Raises:
        OutOfTimeError: it was not done at ``until`` of ``time.monotonic()``.
        OSError: it cannot be written.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # so that each is aligned
    header, end = {}, 0
    for name, value in ordered:
        kind = _NAMES.get(str(value.dtype).removeprefix("torch."))
        begin, end = end, end + value.numel() * value.dtype.itemsize
        shape = list(value.shape) if kind else [end - begin]
        header[name] = {"dtype": kind or "U8", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        for piece in _pieces(len(head).to_bytes(8, "little") + head, [value for _, value in ordered]):
            if time.monotonic() > until:
                raise OutOfTimeError
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _pieces(head: bytes, values: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for value in values:
        flat = _flat(value)
        data = _bytes_of(flat)
        yield from (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file.

    Raises:
        BrokenTensorsError: it is not whole.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(MAX_HEADER, size - 8):
            raise BrokenTensorsError(f"{path} is cut short, or no safetensors file")
        try:
            header = json.loads(file.read(length))
            rows = [(str(name), *_row(row)) for name, row in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BrokenTensorsError(f"{path} has a header that cannot be read: {error}") from None
        found, before = {}, 0
        for name, dtype, shape, begin, end in sorted(rows, key=lambda row: row[3:]):
            if begin < before:
                raise BrokenTensorsError(f"{path}: {name} overlaps another tensor: a small file would become a large one")
            before = end
            if end - begin != prod(shape) * dtype.itemsize:
                raise BrokenTensorsError(f"{path}: {name} has {end - begin} bytes, which are not those of its shape")
            if 8 + length + end > size:
                missing = 8 + length + end - size
                raise BrokenTensorsError(f"{path} is cut short: {missing} bytes of {name} are not there")
            data = bytearray(end - begin)
            file.seek(8 + length + begin)
            file.readinto(data)
            found[name] = (
                torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype, device="cpu")
            )
    return found


def digest_of(value: Tensor) -> str:
    """A checksum of a tensor's bits, whatever its strides."""
    flat = _flat(value)
    return hashlib.sha256(_bytes_of(flat)).hexdigest()


def _flat(value: Tensor) -> Tensor:
    return value.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; valid as long as the tensor is."""
    size = flat.numel() * flat.dtype.itemsize
    return memoryview((ctypes.c_ubyte * size).from_address(flat.data_ptr())).cast("B") if size else memoryview(b"")


def _row(row: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    dtype = getattr(torch, _DTYPES[row["dtype"]])
    begin, end = row["data_offsets"]
    numbers = [*row["shape"], begin, end]
    if any(type(number) is not int or number < 0 for number in numbers) or begin > end:
        raise ValueError("a shape or an offset is no whole number")
    return dtype, tuple(row["shape"]), begin, end
