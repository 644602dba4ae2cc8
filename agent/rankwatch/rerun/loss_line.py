"""Finds the line of the user's that called an operator of the loss, in the source text: the user's code is not run again.

It is sure where one line alone can have called it: of the function that called the model and the backward, and all that it calls.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..shared.types.trip import Source
from ..touch.source import definition_of, inside
from ..touch.stack import outwards
from ..touch.whose_code import owner_of, text_of

MAX_FUNCTIONS = 200

_UNKNOWN = object()


def lines_of_operator(short: str, is_model: Callable[[nn.Module], bool]) -> tuple[list[Source], bool]:
    """The lines that call this operator, such as ``log``: of the functions on the stack, up to the one that called the model.

    Returns also whether no other code can have called it. ``is_model`` tells of a module that it is the model, which is not
    looked at.
    """
    code = _Code(short.strip("_").removesuffix("_forward"), is_model)
    for frame in outwards(sys._getframe(1)):
        if code.has_model:  # what made the loss ran after the model, and so within the frames so far
            break
        if owner_of(frame.f_code.co_filename) == "user":
            code.add(frame.f_code, {**frame.f_globals, **frame.f_locals})
    return list(code.found.values()), code.is_known and code.has_model and len(code.found) == 1


class _Code:
    """The user's code that may have made the loss."""

    def __init__(self, operator: str, is_model: Callable[[nn.Module], bool]) -> None:
        self.found: dict[tuple[str, int], Source] = {}
        self.is_known = True
        self.has_model = False
        """Whether it calls the model."""
        self._operator = operator
        self._is_model = is_model
        self._spelled = {operator, f"{operator}_", *_SPELLED.get(operator, ())}
        self._signs = _SIGNS.get(operator, ())
        self._seen: set[types.CodeType] = set()

    def add(self, code: types.CodeType, names: Mapping[str, Any]) -> None:
        if code in self._seen:
            return
        self._seen.add(code)
        node = definition_of(code) if len(self._seen) <= MAX_FUNCTIONS else None
        if node is None:
            self.is_known = False
            return
        for inner in inside(node):
            if isinstance(inner, (ast.BinOp, ast.AugAssign, ast.UnaryOp)):
                if isinstance(inner.op, self._signs):
                    self._take(code, inner.lineno)
            elif isinstance(inner, ast.Call):
                called = _value_of(inner.func, names)
                name = inner.func.attr if isinstance(inner.func, ast.Attribute) else ""
                if self._is_taken(called, name):
                    self._take(code, inner.func.end_lineno or inner.lineno)
            elif isinstance(inner, (ast.Name, ast.Attribute)):  # it may be called elsewhere
                if (inner.id if isinstance(inner, ast.Name) else inner.attr) in self._spelled:
                    self._take(code, inner.end_lineno or inner.lineno)
                elif isinstance(value := _value_of(inner, names), types.FunctionType) and _is_users(value):
                    self._is_taken(value, "")
                elif isinstance(value, _COMPUTED):
                    self.is_known = False

    def _take(self, code: types.CodeType, line: int) -> None:
        text = text_of(code.co_filename, line)
        self.found[code.co_filename, line] = Source(code.co_filename, line, code.co_name, text)

    def _is_taken(self, called: Any, name: str) -> bool:
        """Whether torch's code that this calls may run the operator. The user's code that it calls is added."""
        if called is _UNKNOWN:
            if name in self._spelled:
                return True
            self.is_known &= bool(name) and hasattr(Tensor, name)  # of a tensor, then
            return False
        if isinstance(called, nn.Module):
            if self._is_model(called):
                self.has_model = True
                return False
            if type(called).__module__.startswith("torch."):
                return self._may_run(type(called).__name__, is_python=True)
            return self._is_taken(types.MethodType(type(called).forward, called), "forward")
        owner = _UNKNOWN
        if isinstance(called, types.MethodType) and isinstance(called.__func__, types.FunctionType):
            called, owner = called.__func__, called.__self__
        elif isinstance(called, type) and isinstance(init := inspect.getattr_static(called, "__init__"), types.FunctionType):
            called = init
        if isinstance(called, types.FunctionType):
            called = inspect.unwrap(called)
        if isinstance(called, types.FunctionType):
            if _is_users(called):
                self.add(called.__code__, _names_of(called, owner))
                return False
            is_functional = called.__module__ in ("torch.nn.functional", "torch.functional")
            return (called.__module__ or "").startswith("torch") and self._may_run(called.__name__, is_python=is_functional)
        if isinstance(called, _BUILT_IN):
            return self._may_run(getattr(called, "__name__", name), is_python=False)
        self.is_known = False
        return False

    def _may_run(self, name: str, *, is_python: bool) -> bool:
        if name in self._spelled:
            return True
        is_composed = is_python or any(part in name for part in ("loss", "similarity", "norm", "dist", "kl_div", "entropy"))
        return is_composed and name not in _OTHERS


_BUILT_IN = (
    type, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip


def _is_users(function: types.FunctionType) -> bool:
    return owner_of(function.__code__.co_filename) == "user"


def _names_of(function: types.FunctionType, owner: Any) -> dict[str, Any]:
    """What the names in a function mean. Its variables are not known, but for its ``self``."""
    code = function.__code__
    own = {name: _UNKNOWN for name in (*code.co_varnames, *code.co_freevars, *code.co_cellvars)}
    if owner is not _UNKNOWN and code.co_argcount:
        own[code.co_varnames[0]] = owner
    return {**function.__globals__, **own}


def _value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an expression means, without running anything of it."""
    if isinstance(node, ast.Name):
        return names[node.id] if node.id in names else getattr(builtins, node.id, _UNKNOWN)
    if not isinstance(node, ast.Attribute):
        return _UNKNOWN
    base = _value_of(node.value, names)
    if isinstance(base, types.ModuleType):
        return vars(base).get(node.attr, _UNKNOWN)
    if base is _UNKNOWN or isinstance(base, (Tensor, *_COMPUTED)):
        return _UNKNOWN
    if isinstance(base, nn.Module) and node.attr in base._modules:
        return base._modules[node.attr]
    found = inspect.getattr_static(base, node.attr, _UNKNOWN)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, types.FunctionType) and not isinstance(base, type):
        return types.MethodType(found, base)
    return found if not isinstance(found, classmethod) else _UNKNOWN


_COMPUTED = (property, functools.cached_property)


_PRODUCTS = ("mm", "bmm", "mv", "dot")
_SIGNS: dict[str, tuple[type[ast.operator] | type[ast.unaryop], ...]] = {
    "div": (ast.Div, ast.FloorDiv), "reciprocal": (ast.Div,), "mul": (ast.Mult, ast.Div), "pow": (ast.Pow,), "add": (ast.Add,),
    "sub": (ast.Sub,), "rsub": (ast.Sub,), **dict.fromkeys(_PRODUCTS, (ast.MatMult,)), "exp2": (ast.Pow,),
    "remainder": (ast.Mod,), "neg": (ast.USub,),
}  # fmt: skip
_CROSS_ENTROPY = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")
_SPELLED = {
    "nll_loss": _CROSS_ENTROPY, "nll_loss2d": _CROSS_ENTROPY, "mse_loss": ("MSELoss",), "ctc_loss": ("CTCLoss",),
    "log_softmax": ("cross_entropy", "CrossEntropyLoss", "LogSoftmax"), "softmax": ("Softmax",),
    "binary_cross_entropy": ("BCELoss",), "binary_cross_entropy_with_logits": ("BCEWithLogitsLoss",),
    "add": ("sum", "scale"), "mul": ("scale", "prod", "multiply"), "div": ("true_divide", "divide"),
    **dict.fromkeys(_PRODUCTS, ("matmul", "linear", "einsum", "inner")), "pow": ("square", "float_power"),
    "linalg_vector_norm": ("norm", "vector_norm"), "mean": ("nanmean",),
}  # fmt: skip
"""What calls an operator, beside its own name."""

_OTHERS = {
    *_CROSS_ENTROPY, "mse_loss", "MSELoss", "binary_cross_entropy", "BCELoss", "binary_cross_entropy_with_logits",
    "BCEWithLogitsLoss", "ctc_loss", "CTCLoss", "softmax", "Softmax", "log_softmax", "LogSoftmax", "relu", "ReLU", "gelu",
    "sigmoid", "Sigmoid", "softplus", "one_hot", "dropout", "embedding", "linear", "pad",
}  # fmt: skip
"""Functions and modules of torch that run an operator of their own: none but those that ``_SPELLED`` gives."""
