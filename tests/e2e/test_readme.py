"""The README: one page, and its output and promises are true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from e2e.pages import PAGES, README, blocks, commands, python_of, run
from jobs import ROOT

pytestmark = pytest.mark.e2e

INSTALL_AND_DEMO, INSTALL_AND_TEST, ONE_NODE, COLLECTOR, EXPORT, TORCHRUN = commands("README.md")


def test_it_is_one_page() -> None:
    assert len(README.encode()) <= 8192


def test_its_links_resolve() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 20
    assert not [link for link in links if not (ROOT / link).is_file()]


def test_its_figures_are_those_of_the_cost_page() -> None:
    detector, default, all_ = re.findall(r"^\| T5-small's shape.*? \| (\S+) \| (\S+) \| (\S+) ", PAGES["cost.md"], re.M)[0]
    assert f"by default about {100 * (float(default) - 1):.0f} % of a step" in README
    assert f"takes {all_} times as long on two CPU cores; with Hugging Face's detector, {detector} times" in README
    assert re.search(r"^\| 8,192 \|.*\| 17 / 36 \|", PAGES["internals/measured.md"], re.MULTILINE)
    assert "8,192 ranks" in README
    assert "17 ms" in README


def test_ci_runs_its_two_commands() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert INSTALL_AND_DEMO in lines
    assert f"{INSTALL_AND_TEST} || quick=$?" in lines  # the gate judges what failed
    assert lines[-1].startswith("PYTHONPATH=tests .venv/bin/python -m gate ")
    assert 'cd "$folder/rankwatch"' in lines  # the name that `git clone` gives the folder


def test_the_guide_contains_its_other_commands() -> None:
    """The guide's tests run them; the guide writes the variables and torchrun of a node in one line."""
    assert {ONE_NODE, COLLECTOR, f"{EXPORT.removeprefix('export ')} {TORCHRUN}"} <= set(commands("guide.md"))


@pytest.mark.slow
def test_one_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(python_of("guide.md", "# train.py"))
    done = run(ONE_NODE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run train-0 finished: 2 ranks, 20 batches, no inf or nan" in done.stderr
    assert "finished" in run("rankwatch list", tmp_path).stdout


@pytest.mark.slow
def test_the_demo_prints_the_report_on_top(tmp_path: Path) -> None:
    assert INSTALL_AND_DEMO.endswith("&& .venv/bin/rankwatch demo")
    done = run("rankwatch demo", tmp_path)
    assert done.returncode == 0, done.stderr
    verdict = json.loads((tmp_path / "rankwatch-runs" / "latest" / "report.json").read_text())["verdict"]
    assert (verdict["rank"], verdict["cause"], verdict["dtype"]) == (1, "overflow", "float16")
    assert verdict["module"] == "decoder.block.1.layer.1.DenseReluDense.dropout"
    # Equal except for this machine's name and folders, omitted lines, and values: CPUs round differently.
    for line in blocks(README, "")[0].split("\n\n")[1].splitlines():
        if line.strip() == "[...]":
            continue
        for fixed in re.split(r"\(vm,|batch \d+.*|/\S*/demo.*|-\d\d,\d{3} .*|batches, loss .*", line):
            assert fixed in done.stdout
    _, said, after = done.stdout.partition("this was the demo: its planted overflow was caught")
    assert said
    again = next(line.split("    #")[0].strip() for line in after.splitlines() if " replay " in line)
    assert run(again, tmp_path).returncode == 0
    diff = run("rankwatch diff rankwatch-runs/latest --rank 0 --rank 1", tmp_path).stdout
    (first,) = re.findall(r"^  first .*: ", blocks(PAGES["views.md"], "")[0], re.MULTILINE)
    assert first in diff
