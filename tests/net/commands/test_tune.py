"""``rankwatch tune``: options of a watched training change while it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import rankwatch
from collectors import Running, until
from links import link_to
from rankwatch.errors import OverflowDetected
from rankwatch.rerun.careful import running_again
from rankwatch.shared.types.frame import BatchSummary, FrameTable, Kind
from rankwatch.shared.types.messages import Counts
from rankwatch_monitor import cli


class Training:
    """A watched model, and the modules in each batch that the collector received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.watch = rankwatch.watch(self.model)
        assert self.watch.is_connected
        self.told: dict[int, list[str]] = {}
        self.batches = 0
        reports = self.watch._reports
        tell = reports.on_batch

        def noted(table: FrameTable, summary: BatchSummary, calls: Counts) -> None:
            called = [spec.module for spec in table.specs if spec.readings[0].kind is not Kind.LOSS]
            self.told.setdefault(summary.batch, []).extend(called)
            tell(table, summary, calls)

        monkeypatch.setattr(reports, "on_batch", noted)

    def batch(self, value: float = 1.0) -> list[str]:
        """Trains one batch; returns the modules of the batch that was received last."""
        self.batches += 1
        self.model(torch.full((3, 4), value)).sum().backward()
        return self.told[max(self.told)]

    def until_told(self, modules: list[str]) -> None:
        """Trains until a batch has these modules and no others."""
        until(lambda: self.batch() == modules)


WHOLE = ["0", "1", "2", ""]


@pytest.fixture
def training(watched: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    training = Training(monkeypatch)
    yield training
    training.watch.close()


def tune(*options: str) -> None:
    assert cli.main(["tune", *options]) == 0


def test_every_and_back(training: Training) -> None:
    assert training.batch() == WHOLE
    tune("--every", "4")
    training.until_told([""])
    first = training.batches
    for _ in range(8):
        training.batch()
    assert all(training.told[batch] == (WHOLE if batch % 4 == 0 else [""]) for batch in range(first, first + 8))
    tune("--every", "1", "--modules", "1")
    training.until_told(["1", ""])
    assert [training.batch() for _ in range(4)] == [["1", ""]] * 4


def test_modules_and_back(training: Training) -> None:
    assert training.batch() == WHOLE
    tune("--modules", "1")
    training.until_told(["1", ""])
    assert training.batch() == ["1", ""]
    tune("--modules", "")
    training.until_told(WHOLE)
    assert training.batch() == WHOLE


def test_patterns_that_match_nothing_are_refused(training: Training, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal() -> str:
        code = cli.main(["tune", "--modules", "1,module.2", "--ignore", "*:outptu,*:output"])
        return capsys.readouterr().err if code else ""

    tune("--ignore", "nothing")  # nothing has been measured yet
    training.batch()
    said: list[str] = []

    def is_refused() -> bool:
        said[:] = [refusal()]
        return bool(said[0])

    until(is_refused)
    assert said[0].rstrip().split(" refused: ")[1].split("; ") == [
        "modules: 'module.2' matches no name among the 4 modules measured so far",
        "did you mean '2'?",
        "ignore: '*:outptu' matches no name or reading among the 4 modules measured so far",
        "did you mean '*:output'?",
        "nothing was changed",
        "modules that are not measured now are known after --modules ''",
    ]


def test_ignore_and_back(training: Training) -> None:
    training.batch()
    tune("--ignore", "*", "--every", "2")
    training.until_told([""])
    for _ in range(2):  # one of the two is measured whole
        training.batch(math.nan)
    tune("--ignore", "", "--modules", "0", "--every", "1")
    training.until_told(["0", ""])
    with pytest.raises(OverflowDetected, match=r"0 \(Linear\)"):
        training.batch(math.nan)


def test_trace_batch_nums(training: Training, capsys: pytest.CaptureFixture[str]) -> None:
    tune("--every", "1000000")
    training.batch()
    training.until_told([""])
    tune("--trace-batch-nums", ",".join(str(batch) for batch in range(0, 9000, 3)))
    training.until_told(WHOLE)  # a traced batch is measured whole, whatever --every says
    first = training.batches - 1
    for _ in range(6):
        training.batch()
    headings = [line.strip("* ") for line in capsys.readouterr().out.splitlines() if "batch number=" in line]
    assert headings == [f"Starting batch number={batch}" for batch in (first, first + 3, first + 6)]
    assert [training.told[batch] == WHOLE for batch in range(first, first + 7)] == [True, False, False] * 2 + [True]


@pytest.mark.parametrize(
    ("check", "reached"), [("frame", ["0"]), ("batch", ["0", "1", "2"]), ("async", ["0", "1", "2", "returned"])]
)
def test_check(training: Training, check: str, reached: list[str]) -> None:
    training.batch()
    tune("--check", check, "--modules", "0,1")
    training.until_told(["0", "1", ""])
    came_by: list[str] = []

    def passed(name: str) -> None:
        if running_again() is None:  # the close-up calls the users' hooks, too
            came_by.append(name)

    for name, module in training.model.named_children():
        module.register_forward_pre_hook(lambda *_, name=name: passed(name))

    def bad_batch() -> None:
        training.model(torch.full((3, 4), math.nan))
        came_by.append("returned")
        training.model(torch.ones(3, 4))

    with pytest.raises(OverflowDetected, match=r"0 \(Linear\)"):
        bad_batch()
    assert came_by == reached


def test_only_the_named_run_is_tuned(training: Training) -> None:
    training.batch()
    assert cli.main(["tune", "other-0", "--every", "2"]) == 2
    tune("train-0", "--modules", "0,2")
    training.until_told(["0", "2", ""])
    assert [""] not in training.told.values()


def test_a_rank_that_connects_later_is_tuned_before_its_first_batch(
    watched: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = link_to(watched.collector.connection, 0, 2)
    assert first.start()
    tune("--modules", "0", "--trace-batch-nums", "7")
    for variable, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(variable, value)
    late = Training(monkeypatch)
    assert late.batch() == ["0", ""]
    late.watch.close()
    first.close("finished", "")
    assert list(watched.collector.ledger.runs) == ["train-0"]
