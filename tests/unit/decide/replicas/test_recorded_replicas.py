"""What is said of the replicas of all trainings of ``agreeing`` and of ``desynced``, by what their ranks sent."""

from __future__ import annotations

from pathlib import Path

import pytest

import makers
from rankwatch.shared.link import wire
from recorded.recording import COMMAND, HERE, Recording, Sent, file_of, read
from recorded.truths import read_truths, untrue

HEALTHY, DESYNCED = read_truths()


@pytest.mark.parametrize("name", HEALTHY)
def test_replicas_of_a_healthy_training_are_left_in_peace(name: str) -> None:
    played = read(file_of("agreeing", name)).play()
    assert played.refused == []
    (report,) = played.reports
    assert HEALTHY[name].complaints(report) == []


@pytest.mark.parametrize("name", DESYNCED)
def test_replicas_that_are_not_one_model_are_named(name: str) -> None:
    (truth, groups), recording = DESYNCED[name], read(file_of("desynced", name))
    played = recording.play()
    assert played.refused == []
    (report,) = played.reports
    assert truth.complaints(report["desync"], played.said) == []
    assert untrue(report["desync"], groups, recording.alike) == []


def test_each_training_is_recorded_and_no_recording_is_left_over() -> None:
    recorded = {table: {file.stem for file in (HERE / table).iterdir()} for table in ("agreeing", "desynced")}
    assert recorded == {"agreeing": set(HEALTHY), "desynced": set(DESYNCED)}, COMMAND


@pytest.mark.parametrize("kind", [b"HELP!", b"HELLO!"], ids=["a kind that there is no more", "fields that do not fit"])
def test_a_recording_of_another_wire_format_says_how_to_record_again(tmp_path: Path, kind: bytes) -> None:
    file = tmp_path / "agreeing" / "ddp.xz"
    Recording((Sent(0, 0, wire.encode(makers.hello()).replace(b"HELLO", kind)),)).write(file)
    with pytest.raises(AssertionError, match=f"record it again: {COMMAND} agreeing/ddp"):
        read(file)
