"""The metrics of a real collector with real ranks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from collectors import PATIENCE, until
from e2e.site import Site, trip_stops_all
from jobs import ROOT, forked, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RANKS = 2


def url_of(site: Site) -> str:
    url: str = re.findall(r"metrics on (http://127\.0\.0\.1:\d+/metrics)", site.log)[-1]
    return url


def text_of(url: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return str(response.read(), "utf-8")


def scrape(site: Site) -> dict[str, float]:
    """Each sample's value, keyed by its name and its label values, in the order of the labels' names."""
    return {
        " ".join([sample.name, *(value for _, value in sorted(sample.labels.items()))]): sample.value
        for family in parse(text_of(url_of(site)))
        for sample in family.samples
    }


def test_a_run_from_its_first_batch_to_its_verdict(site: Site) -> None:
    site.collect("--metrics", "127.0.0.1:0")
    assert scrape(site)["rankwatch_runs"] == 0
    ranks = site.start(RANKS)
    for rank, batches in zip(ranks, (5, 3), strict=True):
        assert rank.ask("batches", batches) == batches
        assert rank.ask("settle")
    until(lambda: scrape(site)["rankwatch_batch_skew train-0"] == 2)  # those of rank 1 may come after all of rank 0
    found = scrape(site)
    assert found["rankwatch_batches_total train-0"] == 5
    assert found["rankwatch_runs"] == 1
    assert found["rankwatch_ranks train-0 running"] == RANKS
    assert found["rankwatch_trips_total train-0"] == 0
    assert 2**60 < found["rankwatch_headroom_ratio train-0"] < 2**140  # numbers near one, in float32
    assert found["rankwatch_received_messages_total"] > 8
    assert found["rankwatch_received_bytes_total"] > 1000
    assert 0 <= found["rankwatch_loop_age_seconds"] < PATIENCE
    trip_stops_all(site, culprit=1)
    until(lambda: scrape(site)["rankwatch_runs"] == 0)
    found = scrape(site)
    assert found["rankwatch_trips_total train-0"] == 1
    assert found["rankwatch_run_state train-0 aborted"] == 1
    assert found["rankwatch_ranks train-0 aborted"] == RANKS
    assert found["rankwatch_ended_runs_total aborted"] == 1
    assert "rankwatch_headroom_ratio train-0" not in found
    assert site.end() == 0


def test_a_rank_that_is_killed_is_counted_as_lost(site: Site) -> None:
    site.collect("--metrics", "127.0.0.1:0", "--metrics-per-rank")
    ranks = site.start(RANKS)
    site.train(2)
    until(lambda: scrape(site).get("rankwatch_rank_batch 1 train-0") == 1)
    ranks[1].kill()
    until(lambda: scrape(site)["rankwatch_ranks train-0 lost"] == 1)
    assert scrape(site)["rankwatch_rank_state 1 train-0 lost"] == 1


def test_the_metrics_are_well_formed_and_contain_all_that_the_dashboard_queries(site: Site) -> None:
    site.collect("--metrics", "127.0.0.1:0", "--metrics-per-rank")
    (rank,) = site.start(1)
    rank.ask("batches", 2)
    until(lambda: "rankwatch_headroom_ratio train-0" in scrape(site))  # the last to appear: it comes from the record
    text = text_of(url_of(site))
    families = list(parse_openmetrics(text_of(url_of(site), "application/openmetrics-text; version=1.0.0")))
    assert {"rankwatch_ranks", "rankwatch_batches", "process_cpu_seconds"} <= {family.name for family in families}
    told = {sample.name for family in parse(text) for sample in family.samples}
    dashboard = (ROOT / "deploy" / "grafana" / "rankwatch.json").read_text()
    rules = (ROOT / "deploy" / "prometheus" / "rankwatch.rules.yml").read_text()
    named = set(re.findall(r"\b(?:rankwatch|process)_\w+", dashboard + rules))
    assert named <= told
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here; it comes with Debian's package prometheus")
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


# --- a real Prometheus ----------------------------------------------------------------------------------------------------


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Runs Prometheus with our config, scraping ``target`` each second; yields its address."""
    config = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    for ours, here in (("127.0.0.1:9464", target), ("_interval: 15s", "_interval: 1s")):
        assert ours in config
        config = config.replace(ours, here)
    shutil.copytree(ROOT / "deploy" / "prometheus", folder / "etc")
    (folder / "etc" / "prometheus.yml").write_text(config)
    log = folder / "prometheus.log"
    command = ["prometheus", "--config.file", "etc/prometheus.yml", "--storage.tsdb.path", "data"]
    with log.open("w") as stderr:
        process = subprocess.Popen([*command, "--web.listen-address", "127.0.0.1:0"], cwd=folder, stderr=stderr)
    try:
        until(lambda: process.poll() is not None or "Server is ready" in log.read_text())
        found = re.search(r"Listening on\W+address=(\S+)", log.read_text())
        assert found, log.read_text()
        yield f"http://{found[1]}"
    finally:
        process.terminate()
        process.wait()


def asked(address: str, path: str, **parameters: str) -> Any:
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"{address}/api/v1/{path}?{query}", timeout=PATIENCE) as response:
        return json.load(response)["data"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not here; it is a package of Debian's")
def test_a_real_prometheus_scrapes_the_collector_and_its_alerts_fire(site: Site, tmp_path: Path) -> None:
    site.collect("--metrics", "127.0.0.1:0")
    site.start(RANKS)
    site.train(2)
    with prometheus(tmp_path, url_of(site).split("/")[2]) as address:

        def value(expression: str) -> list[str]:
            return [each["value"][1] for each in asked(address, "query", query=expression)["result"]]

        until(lambda: value('rankwatch_ranks{state="running"}') == [str(RANKS)])
        assert value("rankwatch_run_info * on (instance, run) group_left (state) (rankwatch_run_state == 1)") == ["1"]
        until(lambda: not alerts(address))  # before the first scrape the alert for a missing collector fires
        trip_stops_all(site, culprit=0)
        until(lambda: ("RankwatchOverflow", "firing") in alerts(address))
        assert [name for name, state in alerts(address) if state == "firing"] == ["RankwatchOverflow"]
        site.end()
        until(lambda: ("RankwatchCollectorDown", "pending") in alerts(address))


def alerts(address: str) -> set[tuple[str, str]]:
    return {(each["labels"]["alertname"], each["state"]) for each in asked(address, "alerts")["alerts"]}


# --- with `rankwatch run` -------------------------------------------------------------------------------------------------


def test_run_serves_metrics_too(tmp_path: Path) -> None:
    job = run_job(tmp_path, forked("train.py", "overflow"), "--metrics", ":0")
    assert job.code == 77
    assert re.search(r" INFO rankwatch: metrics on http://127\.0\.0\.1:\d+/metrics$", job.stderr, re.MULTILINE)
