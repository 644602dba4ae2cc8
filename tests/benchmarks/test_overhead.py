"""The overhead benchmark runs, each mode finds its nan, and the tables are written. Its figures are not checked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jobs import finished

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.slow]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the benchmark's models are those of transformers")
    script, tables = Path(__file__).with_name("overhead.py"), tmp_path / "tables.json"
    # Without the table of memory: each row starts a process.
    options = (
        "--small --tables steps,parts,calls,budget,counted,measure --models gpt2 --dtypes float32 --ways eager --steps 2"
    )
    done = finished([sys.executable, str(script), *options.split(), "--json", str(tables)])
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(tables.read_text())
    modes = {row["mode"]: row for row in written["steps"] if row["model"] == "gpt2"}
    assert modes.keys() == {
        *("bare", "bare (again)", "hugging face", "frame", "batch", "async", "every=10", "between", "no guard", "skip")
    }
    assert not any(row["blind"] for row in modes.values())
    assert {row["part"] for row in written["parts"]} == {
        *("guard", "root's entry", "loss", "guard, clipped", "root's entry, clipped", "loss, clipped"),
        *("fingerprint", "fingerprint, clipped", "fingerprint, all"),
        *("a rank alone, between", "a rank alone, between, clipped"),
        *("all hooks", "all hooks, clipped", "all hooks, between", "all hooks, between, clipped", "all hooks, budget"),
    }
    assert {(row["model"], row["way"]) for row in written["calls"]} == {
        ("400 linear layers of 16", "eager"),
        ("2 x 64 experts of 32", "eager"),
        ("40 linear layers of 16", "compiled"),
    }
    assert [row["kind"] for row in written["counted"]] == [
        *("all_reduce", "broadcast", "all_gather_into_tensor", "all_to_all_single"),
    ]
    assert {row["dtype"] for row in written["measure"]} == {"float32", "bfloat16", "float16"}


def test_compiling(tmp_path: Path) -> None:
    script, rows = Path(__file__).with_name("compiling.py"), tmp_path / "rows.json"
    options = ["--models", "layers", "--small", "--pairs", "1", "--json", str(rows)]
    done = finished([sys.executable, str(script), *options])
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["mode"] for row in json.loads(rows.read_text())] == ["bare (again)", "default"]


def test_sections(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the benchmark's models are those of transformers")
    script, rows = Path(__file__).with_name("sections.py"), tmp_path / "rows.json"
    options = "--models t5 --way eager --small --rounds 2"
    done = finished([sys.executable, str(script), *options.split(), "--json", str(rows)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["mode"] for row in json.loads(rows.read_text())] == ["bare", "bare (again)", "default", "between"]
