"""What lies in deploy/ for Prometheus and Grafana: the real promtool takes it, and it names only metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import ROOT
from rankwatch_monitor.serve.metrics.families import families
from rankwatch_monitor.serve.metrics.meters import Readout

PROMETHEUS, GRAFANA = ROOT / "deploy" / "prometheus", ROOT / "deploy" / "grafana"
RULES = PROMETHEUS / "rankwatch.rules.yml"
DASHBOARD = json.loads((GRAFANA / "rankwatch.json").read_text())
FILES = [*PROMETHEUS.glob("*.yml"), *GRAFANA.glob("*.json")]

SUFFIXES = {"counter": "_total", "info": "_info"}
OURS = {f"{family.name}{SUFFIXES.get(family.type, '')}" for family in families(Readout(), per_rank=True)}
OTHERS = {"up", "ALERTS", "process_cpu_seconds_total", "process_resident_memory_bytes"}
"""Prometheus's own, and those of prometheus_client that tests/e2e/test_metrics.py finds in a real scrape."""

PROMQL = {*("sum", "min", "rate", "increase", "absent", "label_values"), *("by", "on", "group_left", "or")}
LABELS = {"run", "state", "instance"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here; it comes with Debian's package prometheus"
)


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def panels() -> Iterator[tuple[str, str]]:
    """The title of each panel, with each of its expressions."""
    for panel in DASHBOARD["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


EXPRESSIONS = [expr for _, expr in panels()] + [each["expr"] for each in DASHBOARD["annotations"]["list"]]
CONDITIONS = re.findall(r"^ +expr: (.*)$", RULES.read_text(), re.MULTILINE)


def names_in(expression: str) -> set[str]:
    """All words of an expression but the durations, and the matchers' labels and values."""
    bare = re.sub(r'\{[^}]*\}|\[[^\]]*\]|"[^"]*"', " ", expression)
    return set(re.findall(r"[A-Za-z_:][\w:]*", bare))


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *CONDITIONS])
def test_every_metric_that_is_asked_for_exists(expression: str) -> None:
    names = names_in(expression) - PROMQL - LABELS
    assert names
    assert names <= OURS | OTHERS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_metric_that_is_named_exists(path: Path) -> None:
    # A word of a longer one, such as a rule's file, is none.
    assert set(re.findall(r"(?<![\w.-])rankwatch_\w+", path.read_text())) <= OURS


def test_every_metric_of_a_run_is_on_the_dashboard() -> None:
    shown = set().union(*map(names_in, EXPRESSIONS))
    assert {name for name in OURS if "_rank_" not in name} - shown == {"rankwatch_build_info", "rankwatch_ended_runs_total"}


def test_there_is_an_alert_for_each_thing_that_goes_wrong() -> None:
    assert set(re.findall(r"- alert: (\w+)", RULES.read_text())) == {
        *("RankwatchRankLost", "RankwatchRankStalled", "RankwatchHeadroomLow", "RankwatchCollectorDown"),
        *("RankwatchOverflow", "RankwatchBatchesDropped", "RankwatchCollectorStuck", "RankwatchDesync"),
        *("RankwatchStepSkipped", "RankwatchCollectivesDiffer"),
    }
    assert len(CONDITIONS) == RULES.read_text().count("summary:") == RULES.read_text().count("description:") == 10


@needs_promtool
def test_promtool_takes_the_scrape_config_and_the_rules() -> None:
    assert "1 rule files found" in promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert "10 rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))


@needs_promtool
def test_the_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(PROMETHEUS / "rankwatch.rules.test.yml"))


@needs_promtool
def test_promtool_takes_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    filled = [expression.replace("$__rate_interval", "1m").replace("$run", "train-0") for expression in EXPRESSIONS]
    assert not [expression for expression in filled if "$" in expression]
    rules = [{"record": f"dashboard:{number}", "expr": expression} for number, expression in enumerate(filled)]
    path = tmp_path / "dashboard.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    assert f"{len(filled)} rules found" in promtool("check", "rules", str(path))


def test_the_dashboard_goes_by_its_variables() -> None:
    variables: dict[str, Any] = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert names_in(variables["run"]["definition"]) - PROMQL - LABELS == {"rankwatch_run_info"}
    sources = [panel["datasource"] for panel in DASHBOARD["panels"]]
    sources += [target["datasource"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert {source["uid"] for source in sources} == {"${datasource}"}
    by_run = [expression for _, expression in panels() if '{run=~"$run"' in expression]
    assert len(by_run) > 10


def test_no_two_panels_lie_on_each_other() -> None:
    places: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        assert max(x for x, _ in cells) < 24
        places |= cells
