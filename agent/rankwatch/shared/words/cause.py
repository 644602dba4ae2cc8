"""The causes of a trip, in one table. Used by the collector, and by an agent without one.

A trip says that a number was bad. Its cause is the earliest thing that went wrong, as far back as the evidence reaches:

1. Where the number was seen decides what can have gone wrong: a loss has no weights, and a collective has other ranks.
2. In a module, an operator that made bad numbers of good ones is the origin, whatever else came in. Next come bad
   parameters, then what the module was given: bad data, a tensor that was changed in place, a weight elsewhere in the model,
   code between the modules.
3. If nothing that is known was bad, the extremes of the finite numbers tell what is likely.

The rules stand in this order, and the first one that holds tells the cause. What to try, and what a program can do next, stand
beside the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..types.action import Action
from ..types.closeup import CloseUp
from ..types.frame import REDUCED, SUMMED, State
from ..types.trip import Cause, Trip
from . import advice, facts, sentences
from .operators import operand

_Advice = Callable[[Trip, CloseUp | None], str]
_Next = Callable[[Trip], Action]


class CauseAdvice(NamedTuple):
    """What to try, for people, and the action, for programs. An action that depends on the trip is a function of it."""

    text: _Advice
    action: Action | _Next


ADVICE: dict[Cause, CauseAdvice] = {
    Cause.OVERFLOW: CauseAdvice(advice.overflow, Action.FIX_CODE),
    Cause.SINGULAR: CauseAdvice(advice.singular, Action.FIX_CODE),
    Cause.INVALID: CauseAdvice(advice.invalid, Action.FIX_CODE),
    Cause.WEIGHT: CauseAdvice(advice.weight, advice.after_weight),
    Cause.DATA: CauseAdvice(advice.data, advice.after_data),
    Cause.UPSTREAM: CauseAdvice(advice.upstream, Action.FIX_CODE),
    Cause.GRADIENT: CauseAdvice(advice.gradient, Action.FIX_CODE),
    Cause.REDUCTION: CauseAdvice(advice.reduction, Action.FIX_CODE),
    Cause.DIVERGENCE: CauseAdvice(advice.divergence, Action.FIX_CODE),
    Cause.UNEXPLAINED: CauseAdvice(advice.unexplained, Action.RESTART_ELSEWHERE),
}
"""What to do, unless the rule knows better."""


class CauseRule(NamedTuple):
    """Without a ``cause``, the trip's operator tells the cause. ``advice`` and ``action`` are given where ADVICE does not fit."""

    when: Callable[[Trip], object]
    cause: Cause | None
    sentence: Callable[[Trip], str]
    advice: _Advice | None = None
    action: Action | None = None


def classify(trip: Trip) -> tuple[Cause, str]:
    """The cause of a trip, and its evidence in a sentence."""
    rule = _first(trip)
    return rule.cause or sentences.by_operator(trip)[0], rule.sentence(trip)


def advise(cause: Cause, trip: Trip, closeup: CloseUp | None, *, is_everywhere: bool = False) -> str:
    """The first thing to try. It says nothing that the evidence of the cause does not bear out.

    ``is_everywhere``: all ranks tripped in this batch, each of this cause.
    """
    rule = _rule_of(cause, trip)
    said = (rule.advice if rule is not None and rule.advice is not None else ADVICE[cause].text)(trip, closeup)
    return said.replace(advice.SHARD, advice.ALL_SHARDS) if is_everywhere else said


def action_of(cause: Cause, trip: Trip) -> Action:
    """What a program can do next."""
    rule = _rule_of(cause, trip)
    action = rule.action if rule is not None and rule.action is not None else ADVICE[cause].action
    return action if isinstance(action, Action) else action(trip)


def _rule_of(cause: Cause, trip: Trip) -> CauseRule | None:
    """None: the cause is another one than the trip's own, as the training diverged, or another version recorded it."""
    rule = _first(trip)
    return rule if rule.cause is cause else None


def _first(trip: Trip) -> CauseRule:
    rule = next(rule for rule in RULES if rule.when(trip))
    cause = rule.cause or sentences.by_operator(trip)[0]
    if cause not in (Cause.OVERFLOW, Cause.GRADIENT) or rule.advice is not None or not facts.is_grown_by_other_code(trip):
        return rule
    # Other code has made weights larger: that is said beside what it has led to, and is where to look.
    return rule._replace(
        cause=cause, sentence=lambda t: f"{rule.sentence(t)}; {sentences.by_other_code(t)}", advice=advice.other_code
    )


RULES = (
    CauseRule(facts.own_parameters, Cause.WEIGHT, lambda t: sentences.weight(t, facts.own_parameters(t))),
    CauseRule(
        lambda t: not facts.is_backward(t) and facts.uninitialised(t), Cause.WEIGHT, sentences.uninitialised,
        lambda *_: "initialise it, or load it: reset_parameters() after to_empty(), and the missing keys of load_state_dict",
        Action.FIX_CODE,
    ),
    # The gradient guard did not find where a gradient came from.
    CauseRule(
        lambda t: t.unfound and (t.received or t.collective) and t.culprit.state is State.INF, Cause.REDUCTION,
        lambda t: sentences.unfound(t, "the sum over the ranks may be beyond its dtype, or "),
    ),
    CauseRule(
        lambda t: t.unfound, Cause.GRADIENT, sentences.unfound,
        lambda t, _: advice.unfound(t),
    ),
    # The sum over the forwards of a step.
    CauseRule(
        lambda t: t.culprit.label.endswith(SUMMED), Cause.OVERFLOW, sentences.summed,
        lambda *_: "divide each loss by the number of forwards in a step, lower the loss scale, or accumulate in float32",
    ),
    # A module outside of the model, such as a frozen VAE, handed it what was bad.
    CauseRule(
        lambda t: t.outside is not None and facts.was_given_bad(t.outside), Cause.DATA, sentences.outside, advice.data_outside
    ),
    CauseRule(lambda t: t.outside, Cause.UPSTREAM, sentences.outside, advice.outside),
    # A collective of the ranks' parts.
    CauseRule(lambda t: t.culprit.label.endswith(REDUCED), Cause.REDUCTION, sentences.reduced),
    CauseRule(
        lambda t: t.received, Cause.UPSTREAM,
        lambda t: f"this rank's part was finite, and {t.received} returned nan: another rank's part was bad",
        lambda *_: "look at the ranks whose parts went into it: `also` names those that tripped",
    ),
    CauseRule(
        lambda t: t.collective, Cause.REDUCTION,
        lambda t: f"this rank's part was finite, and {t.collective} returned inf: the sum over the ranks is beyond its "
        "dtype, unless another rank's part was inf",
    ),
    # A loss, which the user's code computes from what the root returned.
    CauseRule(lambda t: facts.is_loss(t) and facts.bad_root_outputs(t), Cause.UPSTREAM, sentences.loss_of_bad),
    CauseRule(
        lambda t: facts.is_loss(t) and t.weights, Cause.WEIGHT,
        lambda t: sentences.weight(t, t.weights) + sentences.scale(t),
    ),
    CauseRule(
        lambda t: facts.is_loss(t) and facts.is_given_bad(t), Cause.UPSTREAM, lambda t: sentences.loss(t, sentences.combined(t)),
        lambda t, _: f"look at where the {operand(facts.given_bad(t)[0])} of the loss comes from: {advice.OPERANDS}",
    ),
    CauseRule(lambda t: facts.is_loss(t) and t.operator, None, sentences.loss),
    CauseRule(lambda t: facts.is_loss(t) and facts.is_nan(t), Cause.INVALID, sentences.loss),
    CauseRule(
        lambda t: facts.is_loss(t) and facts.has_moderate_outputs(t) and not t.loss_scale, Cause.SINGULAR,
        lambda t: sentences.loss(t, "no exp or product of such numbers is inf: a log of 0 or a division by zero is likely"),
    ),
    CauseRule(facts.is_loss, Cause.OVERFLOW, sentences.loss),
    CauseRule(facts.is_backward, Cause.GRADIENT, sentences.gradient),
    # An operator that was given nothing bad.
    CauseRule(facts.is_made_here, None, lambda t: sentences.by_operator(t)[1]),
    # An output of the root, in a batch in which only the root's inputs and outputs were measured.
    CauseRule(lambda t: facts.is_root_alone(t) and facts.bad_root_inputs(t), Cause.DATA, sentences.data),
    CauseRule(lambda t: facts.is_root_alone(t) and t.weights, Cause.WEIGHT, lambda t: sentences.weight(t, t.weights)),
    CauseRule(lambda t: facts.is_root_alone(t) and facts.is_nan(t), Cause.INVALID, sentences.fed),
    CauseRule(facts.is_root_alone, Cause.OVERFLOW, sentences.fed),
    # A module: what is in it, then what went into it.
    CauseRule(facts.parameters_within, Cause.WEIGHT, lambda t: sentences.weight(t, facts.parameters_within(t))),
    CauseRule(lambda t: facts.suspects(t) and facts.bad_root_inputs(t), Cause.DATA, sentences.data),
    CauseRule(lambda t: facts.suspects(t) and t.changed, Cause.UPSTREAM, sentences.changed),
    CauseRule(lambda t: facts.suspects(t) and t.weights, Cause.WEIGHT, lambda t: sentences.weight(t, t.weights)),
    CauseRule(facts.suspects, Cause.UPSTREAM, sentences.between),
    # Nothing bad went into it.
    CauseRule(facts.weights_within, Cause.WEIGHT, lambda t: sentences.weight(t, facts.weights_within(t))),
    CauseRule(facts.is_given_nan, Cause.UPSTREAM, sentences.given),
    CauseRule(lambda t: t.operator, None, lambda t: sentences.by_operator(t)[1]),
    # No operator is known: the extremes of the numbers.
    CauseRule(lambda t: facts.Numbers(t).share > 1.0, Cause.OVERFLOW, sentences.finite),
    CauseRule(lambda t: facts.Numbers(t).can_multiply_past_end(), Cause.OVERFLOW, sentences.product),
    CauseRule(
        lambda t: facts.Numbers(t).largest and t.recurs is False, Cause.UNEXPLAINED,
        lambda t: sentences.unreached(
            t, ", and the same forward, run again, was finite: suspect the hardware, or code that was not run again"
        ),
    ),
    CauseRule(facts.is_nan, Cause.INVALID, lambda t: sentences.finite(t, f", but the {t.culprit.label} is nan")),
    CauseRule(lambda t: not (facts.Numbers(t).largest and facts.Numbers(t).inputs), Cause.OVERFLOW, sentences.finite),
    CauseRule(
        lambda t: facts.Numbers(t).can_exp_pass_end(), Cause.OVERFLOW,
        lambda t: f"{sentences.finite(t)}, which exp would take past the end",
    ),
    # A pole needs a zero. Else a number that no reading shows may have been multiplied in.
    CauseRule(lambda t: facts.Numbers(t).has_zero, Cause.SINGULAR, lambda t: sentences.unreached(t, _LOOK)),
    CauseRule(lambda t: True, Cause.OVERFLOW, lambda t: sentences.unreached(t, _LOOK)),
)  # fmt: skip
"""The first one that holds decides."""

_LOOK = ": look for a division by zero, a log of 0, or a number that is neither input nor weight"
