"""Hostile names through a real collector: nothing that is printed, written or served has a control character or a forged line."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

import makers
from collectors import Running, until
from commands import run as rankwatch
from fuzz.make_corpus import EVIL, saying
from rankwatch.shared.link.sockets import dealer
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameTable
from rankwatch.shared.types.gpu import Gpu
from rankwatch_monitor.record.runs import folders
from rankwatch_monitor.serve.metrics.families import families
from rankwatch_monitor.serve.metrics.meters import Meters

FORGED = "rankwatch: first inf in run forged-0"
HOSTILE = f"\x1b[2J\x1b]0;owned\x07\r\n{FORGED}\n  culprit    rank 7\u2028\u202e</script>"
INF = makers.reading("output", makers.INF)


def rank(running: Running, number: int) -> Iterator[bytes]:
    """What one of two hostile ranks sends: both trip in batch 1, and end."""
    spec = makers.frame(makers.reading("weight"), makers.reading(EVIL), module=EVIL, module_class=EVIL).spec
    specs = FrameTable((spec,))
    named = replace(spec, readings=(spec.readings[0], replace(spec.readings[1], label=HOSTILE)))
    table = FrameTable((replace(named, module=HOSTILE, module_class=HOSTILE),))
    summary = makers.summary(0, of=table)
    yield saying(
        HOSTILE, makers.hello(number, 2, job=EVIL, host=EVIL, device=EVIL, torch=EVIL, gpu=Gpu(EVIL, EVIL, EVIL, EVIL))
    )
    yield saying(HOSTILE, messages.Table(specs))
    yield saying(HOSTILE, messages.Batch(1, summary))
    yield saying(HOSTILE, messages.Noticed(2, makers.notice(module=EVIL, module_class=EVIL, label=EVIL)))
    yield saying(HOSTILE, messages.Off(3, EVIL))
    yield saying(HOSTILE, messages.Tripped(4, replace(makers.trip(INF, at=(1, 0, 0), module=EVIL), unfound=EVIL)))
    yield saying(HOSTILE, messages.Bye(5, "failed", EVIL, makers.moment(1, 0, 1)))


@pytest.fixture
def meters() -> Meters:
    return Meters(time.monotonic())


@pytest.fixture
def run(tmp_path: Path, meters: Meters, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Path:
    """The folder of a run of hostile ranks that is over."""
    caplog.set_level("INFO")
    running = Running(tmp_path, meters=meters)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sockets = [dealer(context, running.collector.connection) for _ in range(2)]
        for message in zip(rank(running, 0), rank(running, 1), strict=True):
            for socket, body in zip(sockets, message, strict=True):
                socket.send(body)
        until(lambda: running.collector.ledger.runs and all(run.over for run in running.collector.ledger.runs.values()))
    finally:
        context.destroy(linger=0)
        running.stop()
    (folder,) = folders(tmp_path / "runs")
    return folder


def check(text: str) -> None:
    assert all(letter.isprintable() or letter in "\n\t" for letter in text), ascii(text)
    assert not any(line.startswith((FORGED, "  culprit    rank 7")) for line in text.splitlines()), text


def test_hostile_names_reach_no_output(run: Path, meters: Meters, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    check("\n".join(record.getMessage() for record in caplog.records))
    assert "culprit" in (run / "report.txt").read_text()
    assert "\\x1b[2J" in (run / "report.txt").read_text()
    for path in (run / "report.txt", run / "report.json"):
        check(path.read_text())
    check("".join(str(metric) for metric in families(meters.read(time.monotonic()), per_rank=True)))
    shutil.copytree(run, run.parent / "\x1b[31mforged\nfolder")
    page = tmp_path / "page.html"
    for arguments in (
        ("list", str(run.parent)),
        ("report", str(run)),
        ("report", str(run), "--rank", "0"),
        ("report", str(run.parent / "\x1b[31mforged\nfolder")),
        ("report", str(run.parent / "\x1b[31mno\nsuch")),
        ("export", str(run), "--jsonl", "--frames"),
        ("diff", str(run), "--rank", "0", "--rank", "1", "--batch", "0"),
        ("top", str(run), "--once"),
        ("top", str(run)),
        ("report", str(run), "--html", str(page)),
    ):
        done = rankwatch(*arguments)
        check(done.stdout + done.stderr)
        assert done.stdout or done.stderr or "--html" in arguments
    html = page.read_text()
    assert "\x1b" not in html
    assert "rank 7\\u2028" not in html
    assert f"\n{FORGED}" not in html
