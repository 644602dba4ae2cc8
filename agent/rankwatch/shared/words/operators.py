"""What operators do at the end of their range: an operator that made inf or nan -> the cause, its sentence, and what to do.

Sentence and advice come from the same row of a table: what is said of an operator is what its advice is about.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ..figures import end_of, figure
from ..types.frame import DTYPE_MAX, DTYPE_TINY, NON_FINITE, Reading, State
from ..types.trip import LOSS, Cause, Operator

_Pole = Callable[[tuple[float, ...], float], bool]


class Reason(NamedTuple):
    """Why an operator made inf or nan: the cause, its evidence, and what to do about it where the operator is called."""

    cause: Cause
    sentence: str
    mend: str


class _Truth(NamedTuple):
    """What is true of an operator at the end of its range (empty: the numbers say so), and what to do."""

    truth: str
    mend: str

    def of(self, cause: Cause, made: str) -> Reason:
        return Reason(cause, ": ".join(filter(None, (made, self.truth, self.mend))), self.mend)


def operand(given: Reading) -> str:
    """By its name in the operator, and the user's. torch calls the first one ``self``, and the second one of a sum ``other``."""
    name, colon, users = given.label.partition(": ")
    return {"self": "operand", "other": "other operand"}.get(name, name) + colon + users


def is_own(operator: Operator) -> bool:
    """Whether the operator is the origin, whatever came into the module: nothing bad went in, or only a mask."""
    is_clean = all(
        one.state is not State.NAN and (one.state is not State.INF or one.dtype == "float") for one in operator.inputs
    )
    return is_clean or _is_masked(operator) or (bool(operator.operands) and all(map(math.isfinite, operator.operands)))


def explain(operator: Operator) -> Reason:
    """The operator's inputs were finite, or held -inf on purpose."""
    return _with_epsilon(_explain(operator), operator.output.dtype)


def _with_epsilon(reason: Reason, dtype: str) -> Reason:
    """The usual epsilons, 1e-8 say, are 0 in float16: there, the advice says from where on there is one."""
    if dtype != "float16":
        return reason
    mend = reason.mend.replace("an epsilon", f"an epsilon of at least {DTYPE_TINY[dtype]:.1e} (1e-8 is 0 in {dtype})")
    return reason._replace(sentence=reason.sentence.replace(reason.mend, mend), mend=mend)


def _explain(operator: Operator) -> Reason:
    name, state, inputs = short_name(operator), operator.output.state, operator.inputs
    cause = Cause.OVERFLOW if state is State.INF else Cause.INVALID
    made = f"{_of(operator)} is {state.word}"
    constant = next((one for one in inputs if one.state is state and one.dtype == "float"), None)
    if name in _CONSTANTS:
        told = f"the code makes a tensor of numbers that hold {state.word}: look at where they were computed"
        return Reason(cause, told, COMPUTED)
    if _is_masked(operator):
        return _explain_masked(operator)
    if operator.detail:
        return _Truth(operator.detail, _DETAILS.get(name, _CLAMP.mend)).of(_by_state(state), made)
    if constant is not None:
        return Reason(cause, f"{made} because the code gives it {state.word} as its {operand(constant)}", COMPUTED)
    if state is not State.INF:
        return _explain_nan(operator, name, made)
    if name in _POLES and _is_pole(operator, name):
        return _POLES[name][1].of(Cause.SINGULAR, made)
    dtype = operator.output.dtype
    if not _can_overflow(operator, name):
        return _NO_VALUE.get(name, _NOWHERE).of(Cause.SINGULAR, made)
    end = f"{dtype} ends at {end_of(dtype)}" if dtype in DTYPE_MAX else "its dtype ends before"
    return _OVERFLOWS.get(name, _WIDER).of(Cause.OVERFLOW, f"{made}, as {end}")


def _by_state(state: State) -> Cause:
    return Cause.SINGULAR if state is State.INF else Cause.INVALID


def _can_overflow(operator: Operator, name: str) -> bool:
    """Whether a product, sum or exponential of such numbers comes to the end of the dtype: else there is no finite value."""
    end = DTYPE_MAX.get(operator.output.dtype, math.inf)
    known = [one.abs_max for one in operator.inputs if one.state is State.FINITE]
    if not known or any(one.state in NON_FINITE for one in operator.inputs):
        return name not in _NO_VALUE
    highest = max(known)
    if name in _NO_VALUE or name in _SUMS:
        return name in _SUMS
    if (
        operator.operands
    ):  # these work element by element; all but the operators of a product or a sum grow like exp, at most
        return name in _ARITHMETIC or highest >= math.log(end) / 2 or math.isinf(end)
    count = max((math.prod(shape) for shape in operator.shapes), default=1)
    return max(highest, highest * highest) * max(count, 1) >= end / 2 or math.isinf(end)


def _explain_masked(operator: Operator) -> Reason:
    if operator.output.state is State.INF:
        mend = "mask the label, too, or fill with torch.finfo(dtype).min"
        return Reason(
            Cause.SINGULAR,
            f"{operator.title} is -inf where what goes in is -inf (masked): a label that chooses such an element costs inf; "
            f"{mend}",
            mend,
        )
    masks = next((operand(one) for one in operator.inputs if one.state is State.INF), "input")
    mend = "leave each row one element, or fill with torch.finfo(dtype).min"
    return Reason(
        Cause.INVALID, f"{operator.title} is nan, as a row of its {masks} is -inf throughout (fully masked): {mend}", mend
    )


def _explain_nan(operator: Operator, name: str, made: str) -> Reason:
    inputs, operands = operator.inputs, operator.operands
    if any(map(math.isinf, operands)) or any(one.state is State.INF for one in inputs):
        told = f"{made}: inf - inf, inf / inf and 0 * inf are nan; look at where this inf was put in"
        return Reason(Cause.INVALID, told, _THIS_INF)
    if not operands and not any(one.state is State.EMPTY for one in inputs):
        highest = max((one.abs_max for one in inputs if one.state is State.FINITE), default=0.0)
        if name in _SUMS or "scaled_dot_product" in name or highest * highest >= DTYPE_MAX["float32"]:
            return _WIDER.of(Cause.OVERFLOW, f"{made}, as it reaches inf - inf on its way")
    row = _DOMAINS.get(name)
    return row.of(Cause.INVALID, made) if row is not None else Reason(Cause.INVALID, made, _CLAMP.mend)


def explain_given(operator: Operator) -> str:
    """The evidence where an operator was given inf or nan that is neither an input nor a weight of its module."""
    bad = next(one for one in operator.inputs if one.state in NON_FINITE)
    return (
        f"{operator.title} was given {bad.state.word} ({bad.label}) that is neither an input nor a weight of this "
        "module: look for a tensor that it keeps as an attribute, or takes from elsewhere"
    )


def explain_gradient(operator: Operator) -> Reason:
    """The evidence where a gradient was bad: what ran in the backward, or in the forward, where it was hidden."""
    made = f"{_of(operator)} is {operator.output.state.word}"
    if operator.module == LOSS:  # what is known is what autograd saved, not what went in
        made = f"the gradient of {_of(operator)} is {operator.output.state.word}"
    mend = _THIS_INF if any(map(math.isinf, operator.operands)) else _CLAMP.mend
    reason = explain(operator) if is_own(operator) and operator.module != LOSS else Reason(Cause.INVALID, made, mend)
    if not operator.node:
        return reason
    title = operator.node.removesuffix("0").removesuffix("Backward")
    if operator.detail:
        reason = _Truth(operator.detail, _DETAILS.get(short_name(operator), _CLAMP.mend)).of(Cause.SINGULAR, made)
    elif operator.module == LOSS and _has_saved_nan(operator):
        reason = _NAN_BELOW.of(Cause.INVALID, made)
    elif title in _SLOPES:
        reason = _with_epsilon(_SLOPES[title].of(Cause.SINGULAR, made), operator.output.dtype)
    return reason._replace(sentence=f"in {operator.node}, {reason.sentence}")


def _has_saved_nan(operator: Operator) -> bool:
    """Whether what autograd has saved for the first bad element is nan, or all that is known of it."""
    return any(map(math.isnan, operator.operands)) or (
        not operator.operands and any(one.state is State.NAN for one in operator.inputs)
    )


def _is_masked(operator: Operator) -> bool:
    name = short_name(operator)
    return operator.operands == (-math.inf,) and (name in _SOFTMAX or "scaled_dot_product" in name)


def short_name(operator: Operator) -> str:
    """``exp`` of ``aten.exp.default``, ``aten.exp_.default`` and ``aten._foreach_exp.List``."""
    parts = operator.name.split(".")
    return parts[1 if len(parts) > 1 else 0].strip("_")


def _is_pole(operator: Operator, name: str) -> bool:
    tiny = DTYPE_TINY.get(operator.output.dtype, 0.0)
    if operator.operands or name in _ALWAYS:
        return _POLES[name][0](operator.operands, tiny)
    return any(reading.state is State.FINITE and _is_tiny(reading.abs_min, tiny) for reading in operator.inputs)


def _of(operator: Operator) -> str:
    """``aten.div of 1 and 0``; without operands, ``aten.mm of abs max 2.33e+00 (self) and 8.00e+03 (mat2)``."""
    if operator.operands:
        return f"{operator.title} of {' and '.join(map(_number, operator.operands))}"
    inputs = [reading for reading in operator.inputs if reading.state is not State.NOT_FLOAT][:_MOST_NAMED]
    if not inputs:
        return operator.title
    return f"{operator.title} of {' and '.join(map(_describe, inputs))}"


def _number(value: float) -> str:
    """A number that lies beside the end of a domain is not told as that end: acos of 1.0000001 is nan, of 1 it is 0."""
    text = f"{value + 0.0:,.6g}"
    return text if text not in ("-1", "1") or float(text) == value else f"{value:.9g}"


def _describe(reading: Reading) -> str:
    if reading.state is State.EMPTY:
        return f"no elements ({reading.label})"
    if reading.dtype == "float":
        return f"{reading.abs_max:,g} ({reading.label})"
    return f"abs max {figure(reading.abs_max)} ({reading.label})"


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
_WIDER = _Truth("", "scale what goes in, or compute this in a wider dtype")
_CLAMP = _Truth("", "clamp what goes in, or add an epsilon")
_DIVISOR = _Truth("", "add an epsilon to the divisor, or clamp it")
_THIS_INF = "look at where this inf was put in, or clamp what goes in"
COMPUTED = "look at the numbers that the code puts there"
"""What to do where the code itself gives an operator inf or nan."""
_NOWHERE = _Truth(
    "it has no finite value for what went in", "look at what goes in, and at lengths and sizes that do not fit"
)

_ALWAYS = (
    "linalg_inv_ex", "linalg_solve_ex", "linalg_slogdet", "linalg_solve_triangular", "triangular_solve", "linalg_lu_solve",
)  # fmt: skip
"""Operators on matrices: of finite ones that are not singular, they are finite."""

_POLES: dict[str, tuple[_Pole, _Truth]] = {
    **dict.fromkeys(
        ("div", "true_divide", "floor_divide"), (lambda operands, tiny: _is_tiny(operands[:2][-1], tiny), _DIVISOR)
    ),
    "addcdiv": (lambda operands, tiny: len(operands) > 2 and _is_tiny(operands[2], tiny), _DIVISOR),
    "reciprocal": (_is_zero, _CLAMP),
    "rsqrt": (_is_zero, _Truth("", "add an epsilon below the root")),
    **dict.fromkeys(("log", "log2", "log10"), (_is_zero, _CLAMP)),
    "xlogy": (lambda operands, tiny: _is_tiny(operands[-1], tiny), _CLAMP),
    "log1p": (_is_at(-1.0), _CLAMP),
    "logit": (_is_at(0.0, 1.0), _Truth("", "give it an eps")),
    "pow": (lambda operands, tiny: len(operands) > 1 and operands[1] < 0 and _is_zero(operands, tiny), _CLAMP),
    **dict.fromkeys(("atanh", "erfinv"), (_is_at(1.0, -1.0), _Truth("", "clamp what goes in to less than 1"))),
    "special_ndtri": (_is_at(0.0, 1.0), _CLAMP),
    **dict.fromkeys(("digamma", "lgamma"), (lambda operands, _: operands[0] <= 0, _CLAMP)),
    "polygamma": (lambda operands, _: operands[-1] <= 0, _CLAMP),
    **dict.fromkeys(
        _ALWAYS, (lambda *_: True, _Truth("the matrix is singular", "add a small multiple of the identity to it"))
    ),
}
"""Operators with a pole: whether these operands lie on it (the second number is the smallest normal of the dtype)."""

_ARITHMETIC = (
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "square", "pow", "exp", "exp2", "expm1", "sinh", "cosh",
    "to_copy", "copy", "addcmul", "addcdiv", "lerp", "reciprocal", "rsqrt", "mse_loss", "ldexp", "cumprod", "hypot",
)  # fmt: skip
"""Products, sums, exponentials and casts: of finite numbers, what is inf was too large."""

_NO_VALUE = {
    **dict.fromkeys(
        ("ctc_loss", "cudnn_ctc_loss"),
        _Truth(
            "there is no alignment: a row has fewer frames than its labels need",
            "drop such rows, or give it zero_infinity=True",
        ),
    ),
}
"""Operators that have no finite value for some finite numbers, however small."""

_DETAILS = {name: row.mend for name, row in _NO_VALUE.items()}
"""What to do where the operator's ``detail`` says what was wrong."""

_OVERFLOWS = {
    **dict.fromkeys(("exp", "exp2"), _Truth("", "subtract the largest value first, or clamp what goes in")),
    **dict.fromkeys(("expm1", "sinh", "cosh"), _Truth("", "clamp what goes in")),
    **dict.fromkeys(("to_copy", "copy"), _Truth("", "keep the wider dtype here, or scale what goes in")),
}

_IN = "clamp what goes in"
_DOMAINS = {
    **dict.fromkeys(("sqrt", "rsqrt"), _Truth("there is no root of a negative number", _IN)),
    **dict.fromkeys(("log", "log2", "log10"), _Truth("there is no log of a negative number", _IN)),
    "log1p": _Truth("it is defined from -1 on", _IN),
    **dict.fromkeys(("acos", "asin"), _Truth("it is defined from -1 to 1", _IN)),
    **dict.fromkeys(("atanh", "erfinv"), _Truth("it is defined between -1 and 1", _IN)),
    "acosh": _Truth("it is defined from 1 on", _IN),
    "logit": _Truth("it is defined between 0 and 1", _IN),
    "pow": _Truth("a negative number has no power with a fraction", "take its abs, or clamp it"),
    **dict.fromkeys(("div", "true_divide"), _Truth("0 / 0 is nan", "add an epsilon to the divisor")),
    **dict.fromkeys(
        ("remainder", "fmod", "floor_divide"), _Truth("there is no remainder of a division by 0", "clamp the divisor")
    ),
    **dict.fromkeys(
        ("std", "std_mean"), _Truth("one element has no deviation (0 / 0)", "use correction=0, or more elements")
    ),
    **dict.fromkeys(
        ("var", "var_mean"), _Truth("one element has no variance (0 / 0)", "use correction=0, or more elements")
    ),
    "mean": _Truth("the mean of no elements is 0 / 0", "look at why nothing is left, or take the sum"),
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward"),
        _Truth(
            "no element is left to average (all labels are ignored): 0 / 0",
            "skip such a batch, or divide a sum by max(1, count)",
        ),
    ),
    **dict.fromkeys(
        ("native_layer_norm", "native_group_norm", "native_batch_norm"),
        _Truth("its input is constant and its eps is 0: 0 / 0", "give it an eps"),
    ),
    "weight_norm_interface": _Truth(
        "a row of v is 0, and has no direction: 0 / 0", "look at what made this row 0: a pruning, an initialisation, a decay"
    ),
}
"""Why an operator makes nan of finite numbers."""

_EPSILON_BELOW = _Truth("its slope at 0 is infinite", "add an epsilon below the root, or clamp what goes in")
_NORM = _Truth("the slope of a norm at 0 is not defined", "add an epsilon to what goes in")
_ACOS = _Truth("its slope at -1 and 1 is infinite", "clamp what goes in to less than 1")
_AT_ZERO = _Truth("its slope at 0 is infinite", "clamp what goes in, before the operator and not after it")
_DEGENERATE = _Truth(
    "two eigenvalues or singular values are equal, or one is 0: the gradient divides by their difference",
    "add small noise to the matrix, or take no gradient through its vectors",
)
_HIDDEN = _Truth(
    "what it made in the forward was inf, and a clamp, min or where hid that: the gradient there is 0 * inf",
    "clamp what goes in, before the operator and not after it",
)
_NAN_BELOW = _Truth(
    "it was given nan, and a nanmean, nansum, where or mask hid that from the loss: the gradient there is 0 * nan",
    "leave such elements out before the operator, not after it",
)
_SLOPES = {
    "Sqrt": _EPSILON_BELOW,
    "Rsqrt": _EPSILON_BELOW,
    "Pow": _Truth("the slope of this power at 0 is infinite", "add an epsilon to what goes in, or clamp it"),
    "Norm": _NORM,
    "LinalgVectorNorm": _NORM,
    "Std": _Truth("the slope of std at constants is infinite", "take the root of var plus an epsilon"),
    **dict.fromkeys(("LinalgEigh", "LinalgEig", "LinalgSvd"), _DEGENERATE),
    "Acos": _ACOS,
    "Asin": _ACOS,
    "Acosh": _Truth("its slope at 1 is infinite", "clamp what goes in to more than 1"),
    "Atanh": _ACOS,
    "Log1P": _Truth("its slope at -1 is infinite", "clamp what goes in to more than -1"),
    **dict.fromkeys(("Exp", "Exp2", "Expm1", "Sinh", "Cosh"), _HIDDEN),
    **dict.fromkeys(("Log", "Log2", "Log10", "Reciprocal", "Xlogy"), _AT_ZERO),
    "Div": _Truth("its divisor was 0 or tiny, and a min, clamp or where hid what it made", "add an epsilon to the divisor"),
    "Mul": _Truth(
        "one of its factors was inf in the forward, and hidden afterwards: 0 * inf", "look at where this inf was made"
    ),
}
"""What is true of an infinite slope, by autograd's name of the function."""
