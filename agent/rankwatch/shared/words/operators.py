"""What operators do at the end of their range: an operator that made inf or nan -> the cause, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..types.frame import DTYPE_MAX, DTYPE_TINY, NON_FINITE, Reading, State
from ..types.trip import Cause, Operator

_Pole = Callable[[tuple[float, ...], float], bool]


def is_own(operator: Operator) -> bool:
    """Whether the operator is the origin, whatever came into the module: nothing bad went in, or only a mask."""
    is_clean = all(
        one.state is not State.NAN and (one.state is not State.INF or one.dtype == "float") for one in operator.inputs
    )
    return is_clean or _is_masked(operator) or (bool(operator.operands) and all(map(math.isfinite, operator.operands)))


def explain(operator: Operator) -> tuple[Cause, str]:
    """The cause and its evidence. The operator's inputs were finite, or held -inf on purpose."""
    name, state, inputs = short_name(operator), operator.output.state, operator.inputs
    cause = Cause.OVERFLOW if state is State.INF else Cause.INVALID
    made = f"{_of(operator)} is {state.word}"
    constant = next((one for one in inputs if one.state is state and one.dtype == "float"), None)
    if name in _CONSTANTS:
        return cause, f"the code makes a tensor of numbers that hold {state.word}: look at where they were computed"
    if _is_masked(operator):
        return _explain_masked(operator)
    if constant is not None:
        return cause, f"{made} because the code gives it {state.word} as its {constant.label}"
    if state is not State.INF:
        return _explain_nan(operator, name, made)
    if _is_pole(operator, name):
        return Cause.SINGULAR, f"{made}: {_POLES[name][1]}"
    dtype = operator.output.dtype
    end = f"{dtype} ends at {DTYPE_MAX[dtype]:.2e}" if dtype in DTYPE_MAX else "its dtype ends before"
    return Cause.OVERFLOW, f"{made}, as {end}: {_OVERFLOWS.get(name, _WIDER)}"


def _explain_masked(operator: Operator) -> tuple[Cause, str]:
    if operator.output.state is State.INF:
        return Cause.SINGULAR, (
            f"{operator.title} is -inf where what goes in is -inf (masked): a label that chooses such an element costs inf; "
            "mask the label, too, or fill with torch.finfo(dtype).min"
        )
    masks = next((one.label for one in operator.inputs if one.state is State.INF), "input")
    return Cause.INVALID, (
        f"{operator.title} is nan, as a row of its {masks} is -inf throughout (fully masked): "
        "leave each row one element, or fill with torch.finfo(dtype).min"
    )


def _explain_nan(operator: Operator, name: str, made: str) -> tuple[Cause, str]:
    inputs, operands = operator.inputs, operator.operands
    if any(map(math.isinf, operands)) or any(one.state is State.INF for one in inputs):
        return Cause.INVALID, f"{made}: inf - inf, inf / inf and 0 * inf are nan; look at where this inf was put in"
    if not operands and not any(one.state is State.EMPTY for one in inputs):
        highest = max((one.abs_max for one in inputs if one.state is State.FINITE), default=0.0)
        if name in _SUMS or "scaled_dot_product" in name or highest * highest >= DTYPE_MAX["float32"]:
            return Cause.OVERFLOW, f"{made}, as it reaches inf - inf on its way: {_WIDER}"
    advice = _DOMAINS.get(name)
    return Cause.INVALID, f"{made}: {advice}" if advice else made


def explain_given(operator: Operator) -> str:
    """The evidence where an operator was given inf or nan that is neither an input nor a weight of its module."""
    bad = next(one for one in operator.inputs if one.state in NON_FINITE)
    return (
        f"{operator.title} was given {bad.state.word} ({bad.label}) that is neither an input nor a weight of this "
        "module: look for a tensor that it keeps as an attribute, or takes from elsewhere"
    )


def explain_gradient(operator: Operator) -> str:
    """The evidence where a gradient was bad: what ran in the backward, or in the forward, where it was hidden."""
    text = explain(operator)[1] if is_own(operator) else f"{_of(operator)} is {operator.output.state.word}"
    if not operator.node:
        return text
    slope = _SLOPES.get(operator.node.removesuffix("0").removesuffix("Backward"))
    if slope is not None:
        text = f"{_of(operator)} is {operator.output.state.word}: {slope}"
    return f"in {operator.node}, {text}"


def _is_masked(operator: Operator) -> bool:
    name = short_name(operator)
    return operator.operands == (-math.inf,) and (name in _SOFTMAX or "scaled_dot_product" in name)


def short_name(operator: Operator) -> str:
    """``exp`` of ``aten.exp.default``, ``aten.exp_.default`` and ``aten._foreach_exp.List``."""
    parts = operator.name.split(".")
    return parts[1 if len(parts) > 1 else 0].strip("_")


def _is_pole(operator: Operator, name: str) -> bool:
    if name not in _POLES:
        return False
    tiny = DTYPE_TINY.get(operator.output.dtype, 0.0)
    if operator.operands:
        return _POLES[name][0](operator.operands, tiny)
    return any(reading.state is State.FINITE and _is_tiny(reading.abs_min, tiny) for reading in operator.inputs)


def _of(operator: Operator) -> str:
    """``aten.div of 1 and 0``; without operands, ``aten.mm of abs max 2.33e+00 (self) and 8.00e+03 (mat2)``."""
    if operator.operands:
        return f"{operator.title} of {' and '.join(f'{value + 0.0:.6g}' for value in operator.operands)}"
    inputs = [reading for reading in operator.inputs if reading.state is not State.NOT_FLOAT][:_MOST_NAMED]
    if not inputs:
        return operator.title
    return f"{operator.title} of {' and '.join(map(_describe, inputs))}"


def _describe(reading: Reading) -> str:
    if reading.state is State.EMPTY:
        return f"no elements ({reading.label})"
    if reading.dtype == "float":
        return f"{reading.abs_max:g} ({reading.label})"
    return f"abs max {reading.abs_max:.2e} ({reading.label})"


def _is_tiny(value: float, tiny: float) -> bool:
    return abs(value) < tiny or value == 0


def _is_zero(operands: tuple[float, ...], tiny: float) -> bool:
    return _is_tiny(operands[0], tiny)


def _is_at(*poles: float) -> _Pole:
    return lambda operands, _: operands[0] in poles


_CONSTANTS = ("lift_fresh", "lift_fresh_copy")
"""The operators through which ``torch.tensor(...)`` and NumPy's numbers come."""

_SOFTMAX = ("softmax", "log_softmax", "safe_softmax")
_SUMS = (
    *("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "dot", "mv", "addmv", "einsum", "convolution", "sum", "mean"),
    *("cumsum", "prod", "cumprod", "embedding_bag", "mkldnn_rnn_layer", "_fft_r2c", "_fft_c2c", "_fft_c2r"),
)
"""Of finite numbers, they make nan only by way of inf."""
_MOST_NAMED = 3
_WIDER = "scale what goes in, or compute this in a wider dtype"
_CLAMP = "clamp what goes in, or add an epsilon"
_DIVISOR = "add an epsilon to the divisor, or clamp it"

_POLES: dict[str, tuple[_Pole, str]] = {
    **dict.fromkeys(("div", "true_divide"), (lambda operands, tiny: _is_tiny(operands[:2][-1], tiny), _DIVISOR)),
    "addcdiv": (lambda operands, tiny: len(operands) > 2 and _is_tiny(operands[2], tiny), _DIVISOR),
    "reciprocal": (_is_zero, _CLAMP),
    "rsqrt": (_is_zero, "add an epsilon below the root"),
    **dict.fromkeys(("log", "log2", "log10"), (_is_zero, _CLAMP)),
    "log1p": (_is_at(-1.0), _CLAMP),
    "logit": (_is_at(0.0, 1.0), "give it an eps"),
    "pow": (lambda operands, tiny: len(operands) > 1 and operands[1] < 0 and _is_zero(operands, tiny), _CLAMP),
    **dict.fromkeys(("atanh", "erfinv"), (_is_at(1.0, -1.0), "clamp what goes in to less than 1")),
    "special_ndtri": (_is_at(0.0, 1.0), _CLAMP),
    **dict.fromkeys(("digamma", "lgamma"), (lambda operands, _: operands[0] <= 0, _CLAMP)),
    "polygamma": (lambda operands, _: operands[-1] <= 0, _CLAMP),
    **dict.fromkeys(("linalg_inv_ex", "linalg_solve_ex"), (lambda operands, _: True, "the matrix is singular")),
}
"""Operators with a pole: whether these operands lie on it (the second number is the smallest normal of the dtype), and what
to do."""

_OVERFLOWS = {
    **dict.fromkeys(("exp", "exp2"), "subtract the largest value first, or clamp what goes in"),
    **dict.fromkeys(("expm1", "sinh", "cosh"), "clamp what goes in"),
    **dict.fromkeys(("to_copy", "copy"), "keep the wider dtype here, or scale what goes in"),
}

_DOMAINS = {
    **dict.fromkeys(("sqrt", "rsqrt"), "there is no root of a negative number: clamp what goes in"),
    **dict.fromkeys(("log", "log2", "log10"), "there is no log of a negative number: clamp what goes in"),
    "log1p": "it is defined from -1 on: clamp what goes in",
    **dict.fromkeys(("acos", "asin"), "it is defined from -1 to 1: clamp what goes in"),
    **dict.fromkeys(("atanh", "erfinv"), "it is defined between -1 and 1: clamp what goes in"),
    "acosh": "it is defined from 1 on: clamp what goes in",
    "logit": "it is defined between 0 and 1: clamp what goes in",
    "pow": "a negative number has no power with a fraction: take its abs, or clamp it",
    "div": "0 / 0 is nan: add an epsilon to the divisor",
    **dict.fromkeys(("std", "std_mean"), "one element has no deviation (0 / 0): use correction=0, or more elements"),
    **dict.fromkeys(("var", "var_mean"), "one element has no variance (0 / 0): use correction=0, or more elements"),
    "mean": "the mean of no elements is 0 / 0",
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward"), "no element is left to average (all labels are ignored): 0 / 0"
    ),
    **dict.fromkeys(
        ("native_layer_norm", "native_group_norm", "native_batch_norm"),
        "its input is constant and its eps is 0: 0 / 0; give it an eps",
    ),
}
"""Why an operator makes nan of finite numbers."""

_EPSILON_BELOW = "its slope at 0 is infinite: add an epsilon below the root, or clamp what goes in"
_SLOPES = {
    "Sqrt": _EPSILON_BELOW,
    "Rsqrt": _EPSILON_BELOW,
    "Pow": "the slope of this power at 0 is infinite: add an epsilon to what goes in, or clamp it",
    "Norm": "the slope of a norm at 0 is not defined: add an epsilon to what goes in",
    "LinalgVectorNorm": "the slope of a norm at 0 is not defined: add an epsilon to what goes in",
    "Std": "the slope of std at constants is infinite: take the root of var plus an epsilon",
    "Acos": "its slope at -1 and 1 is infinite: clamp what goes in to less than 1",
    "Asin": "its slope at -1 and 1 is infinite: clamp what goes in to less than 1",
}
"""What to do about an infinite slope, by autograd's name of the function."""
