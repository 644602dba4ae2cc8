"""The scripts of ``frameworks``: their heads are read, they are short, and the page says what was run. No test runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from frameworks.script import SCRIPTS, Said, all_scripts, read
from jobs import ROOT

MOST_LINES = 80
PAGE = (ROOT / "docs" / "pages" / "frameworks.md").read_text()


def test_the_page_has_a_row_for_each_script() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(all_scripts())


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_is_short_and_plants_its_fault(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert "FAULT" in text
    assert read(path).truth


@pytest.mark.parametrize(
    ("head", "message"),
    [("packages: a\nlaunch: python", "no line truth"), ("packages: a\nlaunch: python\ntruth: line 3", "'line' is no field")],
)
def test_a_head_that_lacks_something_is_refused(tmp_path: Path, head: str, message: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(f'"""What.\n\n{head}\n"""\n')
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_verdict_is_right_if_each_field_of_the_truth_is(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text('"""What.\n\npackages: a[b]>=2 c\nlaunch: torchrun --nproc-per-node 2\ntruth: rank 1, module -|a\n"""\n')
    script = read(path)
    assert (script.distributions, script.launch[0]) == (["a", "c"], "torchrun")
    assert script.is_right(Said({"rank": "1", "module": "", "cause": "data"}, (), ""))
    assert not script.is_right(Said({"rank": "0", "module": "a"}, (), ""))
    assert not script.is_right(Said({}, (), "nothing tripped"))


def test_a_notice_is_right_if_nothing_tripped(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text('"""What.\n\npackages: a\nlaunch: python\ntruth: notice bad-loss\n"""\n')
    script = read(path)
    assert script.is_right(Said({}, ("bad-loss",), "nothing tripped"))
    assert not script.is_right(Said({"rank": "0"}, ("bad-loss",), ""))
    assert not script.is_right(Said({}, (), "nothing tripped"))
