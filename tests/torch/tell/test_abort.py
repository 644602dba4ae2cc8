"""torchrun's error file: torchrun reads what rankwatch writes about a worker's end."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import record

import rankwatch
from rankwatch.errors import ConnectionFileError
from rankwatch.tell.abort import ERROR_FILE, FOLLOWER_DELAY, is_of_the_network, words_of, write_error_file


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    return tmp_path / "error.json"


def fail() -> None:
    raise RuntimeError("what followed from it")


def test_torchs_record_does_not_write_over_it(path: Path) -> None:
    for reason in ("first", "second"):
        write_error_file(reason, 1.0, is_culprit=True)
        with pytest.raises(RuntimeError):
            record(fail)()
        assert json.loads(path.read_text())["message"]["message"] == reason


def test_without_us_torchs_record_writes_it(path: Path) -> None:
    with pytest.raises(RuntimeError):
        record(fail)()
    assert json.loads(path.read_text())["message"]["message"] == "RuntimeError: what followed from it"


def test_a_culprit_that_did_not_trip_is_dated_now(path: Path) -> None:
    before = int(time.time())
    write_error_file("replicas differ", 0.0, is_culprit=True)
    assert before <= int(json.loads(path.read_text())["message"]["extraInfo"]["timestamp"]) <= time.time()


def test_a_follower_is_dated_after_the_culprit_whose_clock_is_ahead(path: Path) -> None:
    write_error_file("followed", 4e9, is_culprit=False)
    assert json.loads(path.read_text())["message"]["extraInfo"]["timestamp"] == str(4_000_000_000 + FOLLOWER_DELAY)


class WithoutWords(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (ConnectionFileError("no connection file at run/connection.json"), False),  # ours
        (WithoutWords(), False),
    ],
)
def test_an_error_of_the_network_follows_from_another_rank(error: Exception, expected: bool) -> None:
    assert is_of_the_network(error) is expected


def test_an_exception_that_cannot_be_written_ends_the_training_as_any_other() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(WithoutWords), rankwatch.watch(model):
        raise WithoutWords
    assert not model._forward_hooks
    assert words_of(WithoutWords()) == "<exception str() failed>"
