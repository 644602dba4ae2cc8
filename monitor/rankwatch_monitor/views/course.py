"""How a run went, for people and for programs."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from rankwatch.shared.figures import figure
from rankwatch.shared.words.text import PHASE_WORDS

from ..decide.core.report import Report
from ..decide.ending.course import Course, GrownReading, LossAt, LossCourse, NearestReading


def fields(report: Report) -> list[tuple[str, str]]:
    """A line each, of what is known."""
    course = report.course
    if course is None:
        return []
    pace = f", {course.pace:.3g} batches a second" if course.pace is not None else ""
    found = [("took", f"{_clock(course.seconds)}{pace}{_since(course)}")]
    found += [("loss", _losses(course))] if course.losses else []
    found += [("nearest", _nearest(course.nearest))] if course.nearest is not None else []
    found += [("grew most", _grown(course.grown))] if course.grown is not None else []
    return found


MOST_HOSTS = 8

LABELS = (
    "took",
    "loss",
    "nearest",
    "grew most",
    "measured",
    "command",
    "options",
    "commit",
    "versions",
    "wandb",
    "saved",
    "rates",
    "written",
    "hosts",
)


def state(report: Report) -> list[tuple[str, str]]:
    """How far a run came, and from where it can go on: in a line, of which a screen may show the beginning alone."""
    course = report.course
    if course is None:
        return []
    far = [f"{report.batches} batch{'es' if report.batches != 1 else ''}"]
    if course.steps and abs(report.batches - course.steps) > 1:  # else there is one a batch
        far.append(f"{course.steps} step{'s' if course.steps != 1 else ''}")
    loss = ""
    if course.first_loss is not None and course.last_loss is not None:
        loss = f"loss {course.first_loss.loss:.3g} -> {course.last_loss.loss:.3g}"
    saved = f"; last saved {last.rpartition('/')[2]}" if (last := _told(report).get("saved", "")) else ""
    come = ("; " if saved else ", ").join(filter(None, (f"{', '.join(far)}{saved}", loss)))
    return [("state", f"{come}; {_clock(course.seconds)}{_since(course)}")]


def beside_loss(report: Report) -> list[tuple[str, str]]:
    """The learning rates, and when other code than a step has written to the weights: facts beside a loss that left its range."""
    told = _told(report)
    return [(name, "\n".join(told[name].split("; "))) for name in ("rates", "written") if told.get(name)]


def how(report: Report) -> list[tuple[str, str]]:
    """Which batches were measured in full, and with what the run was made."""
    return [*([("measured", report.measured)] if report.measured else []), *made_with(report)]


def made_with(report: Report) -> list[tuple[str, str]]:
    """With what the run was made."""
    told = list(_told(report).items())
    hosts = list(dict.fromkeys(row.host for row in report.ranks if row.host))
    more = [f"and {len(hosts) - MOST_HOSTS} more"] if len(hosts) > MOST_HOSTS else []
    return [*told, ("hosts", ", ".join([*hosts[:MOST_HOSTS], *more]))] if told else []


def _told(report: Report) -> dict[str, str]:
    return {label: text for label, _, text in (line.partition(": ") for line in report.made_with)}


def _since(course: Course) -> str:
    if not course.began:
        return ""
    began = datetime.fromtimestamp(course.began, timezone.utc)
    return f", {began:%Y-%m-%d %H:%M} UTC"


def steps(report: Report) -> list[tuple[str, str]]:
    """Whether its optimizer went along: the last line of a run that went well."""
    course = report.course
    if course is None or course.steps is None or report.batches < 2:
        return []
    if course.steps:
        return [("steps", f"{course.steps} before the last of {report.batches} batches")]
    return [
        (
            "steps",
            f"none was seen in {report.batches} batches: what changes the weights, if anything does, is not known here",
        )
    ]


def to_dict(report: Report) -> dict[str, Any] | None:
    course = report.course
    if course is None:
        return None
    found, losses = course._asdict(), course.losses
    del found["signs"]  # the judgement has them
    return {
        "seconds": round(found.pop("seconds"), 3),
        "batches_per_second": found.pop("pace"),
        "optimizer_steps": found.pop("steps"),
        **found,
        "losses": [{**one._asdict(), "first": one.first._asdict(), "last": one.last._asdict()} for one in losses],
    }


def _clock(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))


def _losses(course: Course) -> str:
    named = len(course.losses) > 1
    return "\n".join(
        (f"{one.name}: " if named else "") + _loss(one.first, one.last) + _as_given(one) for one in course.losses
    )


def _loss(first: LossAt, last: LossAt) -> str:
    losses = [first, last] if last.batch > first.batch else [first]
    texts = [f"{one.loss:.4g} in batch {one.batch}" for one in losses]
    if len({one.ranks for one in losses}) > 1:
        return ", ".join(text + (_mean_of(one) or " (1 rank)") for text, one in zip(texts, losses, strict=True))
    return ", ".join(texts) + _mean_of(first)


def _as_given(one: LossCourse) -> str:
    """Where a step has several micro-batches, each loss is mostly divided by their number, and frameworks print another."""
    return ", as given to backward()" if one.is_of_micro_batches else ""


def _mean_of(loss: LossAt) -> str:
    return f" (mean of {loss.ranks} ranks)" if loss.ranks > 1 else ""


def _nearest(one: NearestReading) -> str:
    times = f"x{one.times:.3g}" if one.times < 100 else f"x{one.times:.0f}"
    return f"{_name(one)}: {times} below {one.dtype}'s largest number, on rank {one.rank} in batch {one.batch}"


def _grown(one: GrownReading) -> str:
    factor = one.last / one.first
    grew = f"x{factor:.3g}" if factor < 1e6 else f"x{factor:.0e}"
    values = f"from {figure(one.first)} in batch {one.first_batch} to {figure(one.last)} in batch {one.last_batch}"
    return f"{_name(one)}: {grew}, {values}"


def _name(one: NearestReading | GrownReading) -> str:
    phase = f", {PHASE_WORDS[one.phase]}" if one.phase in PHASE_WORDS else ""
    return f"{one.module or '(root)'} ({one.module_class}{phase}), {one.label}"
