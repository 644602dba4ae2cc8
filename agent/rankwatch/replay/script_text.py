"""The parts of ``repro.py`` that are the same in each: how it begins, and the functions that it may need."""

from __future__ import annotations

HEAD = '''\
"""The {what} of {where} that made {state} on rank {rank}, in batch {batch}.

Written by rankwatch replay, for torch {torch}. Exit code 0: inf or nan again.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = {device}
'''
MODULE = '''\
def make(cls, parameters, buffers, modules, **state):
    """A module without a call of its constructor."""
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made._parameters.update(parameters), made._buffers.update(buffers), made._modules.update(modules)
    made.__dict__.update(state)
    return made
'''
OBJECT = '''\
def new(cls, items=(), **state):
    """An object without a call of its constructor."""
    base = next((base for base in (OrderedDict, dict, list, tuple) if issubclass(cls, base)), object)
    made = base.__new__(cls, items) if base is tuple else base.__new__(cls)
    if base in (dict, OrderedDict):
        for key, value in dict(items).items():
            base.__setitem__(made, key, value)
    elif base is list:
        list.extend(made, items)
    for name, value in state.items():
        object.__setattr__(made, name, value)
    return made
'''
LOAD = '''\
def load(file):
    """The tensors in a safetensors file."""
    body = Path(file).read_bytes()
    begin = 8 + int.from_bytes(body[:8], "little")
    dtypes = {{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
              "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
              "C64": torch.complex64, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn}}
    found = {{}}
    for name, row in json.loads(body[8:begin]).items():
        first, last = row["data_offsets"]
        data = bytearray(body[begin + first : begin + last])
        flat = torch.frombuffer(data, dtype=dtypes[row["dtype"]]) if data else torch.empty(0, dtype=dtypes[row["dtype"]])
        found[name] = flat.view(row["shape"]).to(DEVICE)
    return found


tensors = load({file})
'''
PARAMETER = """\
@functools.cache
def parameter(name, grad=True, **layout):
    return nn.Parameter(laid_out(name, **layout) if layout else tensors[name], grad)
"""
LAYOUT = '''\
def laid_out(name, shape, stride, dtype):
    """With the strides that it had: some kernels compute in another order for others."""
    value = tensors[name].view(dtype)
    if value.dim() == 1 and value.numel() == 1 + sum((size - 1) * step for size, step in zip(shape, stride)):
        return value.as_strided(shape, stride)
    return torch.empty_strided(shape, stride, dtype=dtype, device=DEVICE).copy_(value.view(shape))
'''
FIRST = '''\
class First(TorchDispatchMode):
    """Prints the first operator that made inf or nan of finite numbers."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [is_bad(leaf) for leaf in tree_leaves((args, kwargs))]
        result = func(*args, **kwargs or {})
        if not self.found and not any(given) and any(map(is_bad, tree_leaves(result))) and "empty" not in str(func):
            self.found = True
            print("first bad operator:", func)
        return result
'''
IS_BAD = """\
def is_bad(value):
    return isinstance(value, torch.Tensor) and not bool(torch.isfinite(value).all())
"""
