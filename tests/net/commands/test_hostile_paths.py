"""Paths with escapes, line feeds and bytes that are no text: no command obeys or passes them on, and none ends by them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import records
from commands import run as rankwatch

EVIL = os.fsdecode(b"\x1b[31m\nrankwatch: forged \xff")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of somebody who names folders so, and writes reports by hand."""
    folder = tmp_path_factory.mktemp("runs") / EVIL
    parts = [records.part(rank, *records.frames(batch), seq=batch + 1) for batch in range(3) for rank in (0, 1)]
    records.write(folder / "train-1", *parts)
    shutil.copytree(folder / "train-1", folder / EVIL)
    (folder / "broken").mkdir()
    (folder / "broken" / "run.db").write_bytes(b"no record")
    (folder / "written").mkdir()
    (folder / "written" / "report.txt").write_bytes(b"rankwatch: run x finished\n\x1b[31m\xff\xe2\x80\xae\n")
    (folder / "written" / "report.json").write_bytes('{"a": "\u202e\x1b"}\n'.encode())
    return folder


def check(text: str) -> None:
    assert "Traceback" not in text
    assert all(letter.isprintable() or letter in "\n\t" for letter in text), ascii(text)
    assert not any(line.startswith("rankwatch: forged") for line in text.splitlines()), text


COMMANDS: dict[str, Callable[[Path, Path], tuple[str, ...]]] = {
    "list": lambda runs, out: ("list", f"{runs}"),
    "no folder": lambda runs, out: ("list", f"{runs}/no{EVIL}"),
    "report": lambda runs, out: ("report", f"{runs}/{EVIL}"),
    "report of others": lambda runs, out: ("report", f"{runs}/written"),
    "json of others": lambda runs, out: ("report", f"{runs}/written", "--json"),
    "damaged": lambda runs, out: ("report", f"{runs}/broken"),
    "page": lambda runs, out: ("report", f"{runs}/{EVIL}", "--html", f"{out}{EVIL}.html"),
    "top": lambda runs, out: ("top", f"{runs}/{EVIL}", "--once"),
    "json lines": lambda runs, out: ("export", f"{runs}/{EVIL}", "--jsonl"),
    "stack": lambda runs, out: ("stack", f"{runs}/{EVIL}"),
    "diff": lambda runs, out: ("diff", f"{runs}/{EVIL}", f"{runs}/train-1"),
    "parquet": lambda runs, out: ("export", f"{runs}/{EVIL}", "--parquet", f"{out}{EVIL}.parquet"),
    "tensorboard": lambda runs, out: ("export", f"{runs}/{EVIL}", "--tensorboard", f"{out}{EVIL}"),
    "tune": lambda runs, out: ("tune", "--every", "2", "--connection", f"{out}{EVIL}"),
    "invite": lambda runs, out: ("invite", EVIL, "--connection", f"{out}{EVIL}", "--output", f"{out}{EVIL}"),
    "unknown": lambda runs, out: ("list", ".", EVIL),
    "run": lambda runs, out: ("run", "--runs-dir", f"{runs}/written/report.txt", "--", "true"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_is_printed_and_not_obeyed(folder: Path, tmp_path: Path, command: str) -> None:
    done = rankwatch(*COMMANDS[command](folder, tmp_path / "out"))
    check(done.stdout + done.stderr)
    assert done.stdout + done.stderr


@pytest.mark.parametrize("command", ["report", "top", "stack", "export", "diff", "replay", "archive", "list", "ui"])
def test_a_name_of_5000_letters_is_a_usage_error(command: str) -> None:
    name = "x" * 5000
    more = {"diff": [name], "archive": ["nowhere"], "export": ["--jsonl"]}.get(command, [])
    done = rankwatch(command, name, *more)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "longer than any file's" in done.stderr
