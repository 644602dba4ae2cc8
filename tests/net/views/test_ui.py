"""The page's server over real HTTP, without a browser."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import large_runs
from browser import served
from commands import run as rankwatch


class Client:
    def __init__(self, url: str) -> None:
        self.token = url.partition("token=")[2]
        self.host = urlsplit(url).netloc
        self.cookie = ""

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection(self.host)
        connection.request("GET", path, headers={"Cookie": self.cookie, **headers})
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body

    def json(self, path: str) -> Any:
        status, _, body = self.get(path)
        assert status == 200, body
        return json.loads(body, parse_constant=pytest.fail)

    def enter(self) -> Client:
        _, headers, _ = self.get(f"/?token={self.token}")
        self.cookie = headers["set-cookie"].partition(";")[0]
        return self


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    large_runs.generate(folder / "large-0", 16, 40, modules=20, kept=range(30, 40, 2))
    large_runs.generate(folder / "other-0", 2, 10, modules=20, kept=range(10), trips=False)
    return folder


@pytest.fixture(scope="module")
def stranger(runs: Path) -> Iterator[Client]:
    with served(runs) as url:
        yield Client(url)


@pytest.fixture
def client(stranger: Client) -> Client:
    return Client(f"http://{stranger.host}/?token={stranger.token}").enter()


@pytest.mark.parametrize(
    "path", ["/", "/run/large-0", "/api/runs", "/static/page.js", "/nothing", "/?token=wrong", "/?token="]
)
def test_without_the_token_there_is_nothing_to_see(stranger: Client, path: str) -> None:
    status, headers, body = stranger.get(path)
    assert status == 403
    assert body == "rankwatch: this page needs the token: open the URL that `rankwatch ui` has printed\n"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert stranger.get(path, Cookie="rankwatch-token-0=x")[0] == 403


def test_the_token_leaves_the_address_at_once(stranger: Client) -> None:
    status, headers, _ = stranger.get(f"/run/large-0/modules?rank=3&token={stranger.token}")
    assert (status, headers["location"]) == (303, "/run/large-0/modules?rank=3")
    assert {"HttpOnly", "SameSite=strict"} <= set(headers["set-cookie"].split("; "))
    assert stranger.get(f"//elsewhere.example/?token={stranger.token}")[1]["location"] == "/elsewhere.example/"


def test_every_answer_binds_the_browser(client: Client) -> None:
    for path in ("/", "/static/echarts.min.js", "/api/runs", "/run/none/at/all"):
        headers = client.get(path)[1]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_the_list_has_what_each_run_is(client: Client) -> None:
    runs = {run["run"]: run for run in client.json("/api/runs")["runs"]}
    assert (runs["large-0"]["outcome"], runs["large-0"]["world_size"], runs["large-0"]["batches"]) == ("aborted", 16, 41)
    assert (runs["other-0"]["outcome"], runs["other-0"]["is_over"]) == (None, False)
    assert runs["large-0"]["ended"] - runs["large-0"]["began"] == 40.0
    assert [runs[name]["rate"] for name in ("large-0", "other-0")] == pytest.approx([1.0, 1.0], rel=0.02)


def test_an_overview_has_the_report_and_the_cells(client: Client) -> None:
    body = client.json("/api/run/large-0/overview")
    assert body["report"]["verdict"]["rank"] == 5
    assert body["path"] == [0]
    assert (body["grid"]["rows"][5], len(body["grid"]["cells"]), len(body["grid"]["cells"][0])) == ("5", 16, 41)
    assert body["grid"]["cells"][5][40] == -1
    assert body["order"][0] == [5, "culprit", True]
    assert [rank for rank, _, _ in body["order"][1:]] == [*range(5), *range(6, 16)]
    assert client.json("/api/run/other-0/overview")["silent_collector"] is True


def test_the_curves_have_the_loss_and_the_rate_of_all_ranks_and_of_some(client: Client) -> None:
    body = client.json("/api/run/large-0/curves")
    assert [line["name"] for line in body["loss"]] == ["mean of the ranks", "lowest", "highest", "rank 5"]
    assert [point[0] for point in body["loss"][0]["points"]] == list(range(40))
    lows, highs = (body["loss"][line]["points"] for line in (1, 2))
    assert all(low[1] < high[1] for low, high in zip(lows, highs, strict=True))
    assert {point[1] for point in body["rate"][0]["points"]} == {1.0}
    assert body["gradient"] == []
    mean, *_, own = body["norm"]
    assert [point[:2] for point in mean["points"]] == [point[:2] for point in own["points"]]  # all ranks have the same
    assert mean["points"][0][1] == 0.5
    assert {point[1] for point in body["memory"][-1]["points"]} == {29.302}  # rank 5: 30,005 MiB
    some = client.json("/api/run/large-0/curves?ranks=0,3")
    assert [line["rank"] for line in some["loss"]] == [None, None, None, 0, 3]
    of_two = client.json("/api/run/other-0/curves")["loss"]
    assert [line["name"] for line in of_two] == ["mean of the ranks", "rank 0", "rank 1"]


def test_a_cell_opens_what_is_stored_round_it(client: Client) -> None:
    one = client.json("/api/run/large-0/modules?rank=5&around=40")
    assert (one["rank"], one["first"], len(one["cells"][0]), one["note"]) == (5, 30, 6, "")
    several = client.json("/api/run/large-0/modules?rank=4-7&around=39-40")
    assert (several["rank"], several["note"]) == (5, "Of ranks 4-7, rank 5 is the worst there.")
    none = client.json("/api/run/large-0/modules?rank=99&around=3")
    assert none["rank"] is None
    assert none["note"] == "No batch is stored as rank 99 sent it, so this is over all ranks."


def test_an_answer_comes_once_until_the_record_changes(client: Client, runs: Path) -> None:
    status, headers, _ = client.get("/api/run/other-0/overview")
    assert status == 200
    again = client.get("/api/run/other-0/overview", **{"If-None-Match": headers["etag"]})
    assert (again[0], again[2]) == (304, "")
    (runs / "other-0" / "run.db").touch()
    assert client.get("/api/run/other-0/overview", **{"If-None-Match": headers["etag"]})[0] == 200


def test_modules_of_all_ranks_and_of_one(client: Client) -> None:
    every = client.json("/api/run/large-0/modules")
    assert (every["first"], every["step"], len(every["rows"]), len(every["cells"][0])) == (0, 1, 20, 41)
    one = client.json("/api/run/large-0/modules?rank=5&from=34&to=38&match=blocks.1")
    assert (one["first"], one["step"], len(one["rows"]), len(one["cells"][0])) == (34, 2, 10, 3)
    assert one["keys"][0] == ["blocks.1.part0", "forward"]


def test_a_series_of_ranks_and_of_all(client: Client) -> None:
    body = client.json("/api/run/large-0/series?module=blocks.1.part0&label=output&ranks=all,5")
    assert (body["dtype"], body["limit"]) == ("float16", 65504.0)
    every, one = body["lines"]
    assert (every["rank"], [point[0] for point in every["points"]]) == (None, list(range(40)))
    assert (one["rank"], [point[0] for point in one["points"]]) == (5, [30, 32, 34, 36, 38])
    assert one["points"][0][3] == "finite"
    readings = client.json("/api/run/large-0/readings")
    assert readings[0] == {
        "module": "blocks.0.part0", "class": "Linear", "phase": "forward", "labels": ["weight", "input[0]", "output"],
    }  # fmt: skip


def test_a_diff_and_the_events(client: Client) -> None:
    found = client.json("/api/run/large-0/diff?rank=5&rank=6")
    assert (found["left"], found["right"]) == ("rank 5, batch 38 of large-0", "rank 6, batch 38 of large-0")
    alone = client.json("/api/run/large-0/diff")
    assert (alone["ranks"], alone["batches"], alone["frames"]) == ([5, 5], [38, 40], {"left": 20, "right": 1})
    across = client.json("/api/run/large-0/diff?other=other-0&rank=1&batch=34&batch=4")
    assert across["right"] == "rank 1, batch 4 of other-0"
    told = client.json("/api/run/large-0/events")
    assert (told["events"][0]["kind"], told["events"][-1]["kind"], told["hidden"]) == ("closed", "opened", 0)
    assert client.json("/api/run/large-0/stored?rank=5") == [30, 32, 34, 36, 38]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("none-0/overview", 404, "there is no run none-0 here"),
        (f"{'x' * 5000}/overview", 404, f"there is no run {'x' * 255} here"),
        ("a%00b/overview", 404, "there is no run a\\\\x00b here"),
        ("%2e%2e/overview", 404, "there is no run .. here"),
        ("..%2f..%2fetc/overview", 404, "Not Found"),
        ("large-0/modules?rank=99", 404, "no such batch is kept as rank 99 sent it"),
        ("large-0/modules?rank=-1", 400, "'-1' is no number of a rank or batch"),
        ("large-0/modules?from=9999999999999999999999", 400, "is no number of a rank or batch"),
        ("large-0/series?module=none", 404, "no module none has a reading output in its forward here"),
        ("large-0/series?ranks=" + ",".join("1" * 33), 400, "33 lines are more than the 32"),
        ("large-0/diff?rank=1&rank=2&batch=7", 400, "batch 7 of rank 1 is not kept whole"),
        ("large-0/overview?measure=loss", 400, "measure loss: expected headroom or change"),
        ("large-0/curves?ranks=" + ",".join("1" * 33), 400, "33 lines are more than the 32"),
        ("large-0/modules?rank=5&around=x", 400, "'x' is no number of a rank or batch"),
        ("large-0/diff?rank=99", 400, "there is nothing to compare: no batch of rank 99 is stored as it sent it"),
    ],
)
def test_what_cannot_be_shown_is_said(client: Client, path: str, status: int, says: str) -> None:
    answer = client.get(f"/api/run/{path}")
    assert (answer[0], says in answer[2]) == (status, True), answer


def test_a_record_that_is_none_is_said_and_hides_no_other(client: Client, runs: Path) -> None:
    (runs / "broken-0").mkdir()
    (runs / "broken-0" / "run.db").write_text("no database")
    try:
        listed = {run["run"]: run for run in client.json("/api/runs")["runs"]}
        assert "file is not a database" in listed["broken-0"]["unreadable"]
        assert listed["large-0"]["outcome"] == "aborted"
        assert client.get("/api/run/broken-0/overview")[0] == 400
    finally:
        (runs / "broken-0" / "run.db").unlink()


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = rankwatch("ui", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "Address already in use" in done.stderr
    assert "choose another --host or --port" in done.stderr
    assert rankwatch("ui", str(tmp_path), "--host", "no.such.host.invalid").returncode == 2


def test_folders_that_are_no_text_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\x1b[2J\xff")
    large_runs.generate(tmp_path / "run", 2, 10, modules=20, kept=range(10), trips=False)
    folder.mkdir()
    (tmp_path / "run").rename(folder / os.fsdecode(b"run\xff"))
    (folder / os.fsdecode(b"broken\xff")).mkdir()
    (folder / os.fsdecode(b"broken\xff") / "run.db").write_bytes(b"no record")
    with served(folder) as url:
        body = Client(url).enter().json("/api/runs")
    assert body["folder"] == f"{tmp_path}/\\x1b[2J\\udcff"
    assert {run["run"] for run in body["runs"]} == {"run\\udcff", "broken\\udcff"}
