"""What changed a weight that is bad: each row has what is said of it, and what to do."""

from __future__ import annotations

from typing import NamedTuple

from ..types.action import Action
from ..types.frame import DTYPE_TINY
from ..types.trip import BadWeight, Change, UpdateFact


class _FactRow(NamedTuple):
    """Both are filled with the name, value and place of a fact, and with the smallest normal number of its dtype."""

    sentence: str
    mend: str
    action: Action = Action.FIX_CODE


class Told(NamedTuple):
    """What made a weight bad, and what to do. Empty sentences: that is not known."""

    sentence: str = ""
    mend: str = ""
    action: Action = Action.FIX_CODE


FACTS = {
    "number": _FactRow("its {name} was {value}", "look at what sets {name}: a schedule, a configuration"),
    "state": _FactRow(
        "its {name} is {value}{where}",
        "clear the optimizer's state, or load another one: its {name} is {value}",
        Action.RESTORE_CHECKPOINT,
    ),
    "eps": _FactRow(
        "its {where} is 0 where the weight is bad, and its eps of {name} is 0 in {value}: it divided by 0",
        "give the optimizer an eps of at least {tiny}, or keep the weights and its state in float32",
    ),
    "gradient": _FactRow(
        "the gradient is exactly 0 where the weight is bad: what is divided by the norm of such an update is 0 / 0",
        "add an epsilon to what the step, or code after it, divides by; look at what has no gradient there",
    ),
    "rate": _FactRow("its lr was {name}", "lower the learning rate or lengthen its warm-up"),
}
"""What is known of an optimizer's step, by ``UpdateFact.row``."""

SURE = ("number", "state", "eps")
"""Facts of which each explains a bad weight by itself."""

_OTHER = "other code wrote to it"
_WRITES = "look at code that writes to this weight: a load, a merge, a copy of master weights, an average, clipping, x.data"

_NO_FACT = (
    "look at what else the step reads (learning rate, state, weight decay), and at code that writes to the weight after it"
)


def tell(weight: BadWeight) -> Told:
    known = {fact.row: fact for fact in weight.facts}
    name = known["class"].name if "class" in known else "the optimizer"
    match weight.change:
        case Change.OPTIMIZER:
            rows = [(FACTS[fact.row], fact) for fact in weight.facts if fact.row in FACTS]
            made = f"the gradients were finite, so the step of {name} made it so"
            if not any(fact.row in SURE for fact in weight.facts):
                made = f"the gradients were finite: the step of {name} made it so, or code that wrote to it afterwards"
            told = "; ".join([made, *(_filled(row.sentence, fact) for row, fact in rows)])
            if not rows:
                return Told(told, _NO_FACT)
            row, fact = rows[0]
            return Told(told, _filled(row.mend, fact), row.action)
        case Change.IGNORED:
            return Told(
                f"the scaler had set found_inf, and {name} took the step: it ignores found_inf",
                f"have the scaler skip the step: {name} must not say that it supports found_inf (_step_supports_amp_scaling)",
            )
        case Change.CONVERSION:
            before, now = known["dtype"].name, known["dtype"].value
            return Told(
                f"it was {before} before and is {now} now: the conversion made it so",
                f"keep this weight in {before}, or scale it down before it is converted to {now}",
            )
        case Change.OTHER:
            step = f" since batch {known['step'].name}" if "step" in known and known["step"].name != "-1" else ""
            if "reach" in known:
                reach = known["reach"].name
                return Told(
                    f"the gradients were finite, and the step of {name} changes it by {reach} at most: {_OTHER}", _WRITES
                )
            holds = f"its optimizer has not stepped{step}" if step else "no optimizer that was seen to step holds it"
            return Told(
                f"{holds}: {_OTHER}",
                _WRITES,
            )
        case Change.HANDED:
            return Told(
                "it is no parameter of the module: the training computed it, and handed it to this forward",
                "look at how the training computes this weight: the learning rate and the gradients of an inner loop",
            )
    return Told()


def _filled(text: str, fact: UpdateFact) -> str:
    tiny = f"{DTYPE_TINY.get(fact.value, 0.0):.1e}"
    return text.format(name=fact.name, value=fact.value, where=fact.where, tiny=tiny)
