"""Metrics over HTTP: requests, and what clients that misbehave may cost."""

from __future__ import annotations

import logging
import socket
import struct
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

import makers
from collectors import PATIENCE, Running, until
from commands import run as rankwatch
from ports import free_port
from rankwatch.errors import UsageError
from rankwatch.shared.link import wire
from rankwatch.shared.link.sockets import dealer
from rankwatch.shared.types import messages
from rankwatch_monitor.serve.metrics import server as metrics_server
from rankwatch_monitor.serve.metrics.meters import Meters
from rankwatch_monitor.serve.metrics.server import MAX_SCRAPES, MetricsServer
from standings import shown, standing

HERE = ("127.0.0.1", 0)
MANY = 16_384
"""Ranks whose metrics are larger than a socket's buffers."""


@pytest.fixture
def meters() -> Meters:
    return Meters(time.monotonic())


def scrape(url: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return str(response.read(), "utf-8")


def connect(server: MetricsServer) -> socket.socket:
    host, port = server.server_address[:2]
    return socket.create_connection((str(host), int(port)), PATIENCE)


def ask(server: MetricsServer) -> socket.socket:
    """A client that has sent its request, and does not read."""
    peer = connect(server)
    peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    return peer


def test_both_formats_are_served(meters: Meters) -> None:
    meters.show(shown(standing(batch=6), job='a "job"\\'), time.monotonic())
    with MetricsServer(HERE, meters) as server:
        for text, parser in (
            (scrape(server.url), parse),
            (scrape(server.url, "application/openmetrics-text; version=1.0.0"), parse_openmetrics),
        ):
            samples = [sample for family in parser(text) for sample in family.samples]
            (batches,) = [sample.value for sample in samples if sample.name == "rankwatch_batches_total"]
            assert batches == 7
            names = {sample.name for sample in samples}
            assert {"process_resident_memory_bytes", "python_info", "rankwatch_build_info"} <= names
        assert "rankwatch_runs 1.0" in scrape(f"{server.url}?name[]=rankwatch_runs")
        assert "rankwatch_batch" not in scrape(f"{server.url}?name[]=rankwatch_runs")


def test_all_samples_of_many_ranks_are_served(meters: Meters) -> None:
    meters.show(shown(*map(standing, range(1000))), time.monotonic())
    with MetricsServer(HERE, meters, per_rank=True) as server:
        families = {family.name: family.samples for family in parse(scrape(server.url))}
    assert [sample.labels["rank"] for sample in families["rankwatch_rank_batch"]] == [str(rank) for rank in range(1000)]


@pytest.mark.slow
def test_peers_that_do_not_read_do_not_hold_up_the_collector(
    tmp_path: Path, meters: Meters, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    running = Running(tmp_path, meters=meters)
    with ExitStack() as peers, MetricsServer(HERE, meters, per_rank=True) as server:
        meters.show(shown(*map(standing, range(MANY)), run="large-0"), time.monotonic())
        for slow in [peers.enter_context(ask(server)) for _ in range(2)]:
            assert slow.recv(9) == b"HTTP/1.0 "  # its answer has begun
        rank = dealer(context, running.collector.connection)
        rank.send(wire.encode(makers.hello()))
        assert rank.poll(1000 * PATIENCE)
        assert isinstance(wire.decode(rank.recv()), messages.Welcome)
        until(lambda: 'rankwatch_ranks{run="train-0",state="running"} 1.0' in scrape(server.url))
    until(lambda: meters.read(time.monotonic()).counts.messages == 1)
    running.stop()


def test_there_is_room_for_few_peers_at_a_time(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 10 * PATIENCE)
    with ExitStack() as peers, MetricsServer(HERE, meters) as server:
        silent = [peers.enter_context(connect(server)) for _ in range(MAX_SCRAPES)]
        with connect(server) as one_too_many:
            assert closed(one_too_many)
        silent[0].close()
        until(lambda: answers(server))


def answers(server: MetricsServer) -> bool:
    with ask(server) as peer:
        return not closed(peer)


def closed(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_peer_that_asks_nothing_is_closed(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.05)
    with MetricsServer(HERE, meters) as server:
        with connect(server) as peer:
            assert closed(peer)
        assert "rankwatch_runs 0.0" in scrape(server.url)


def test_peers_that_go_away_are_no_errors(meters: Meters, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    meters.show(shown(*map(standing, range(MANY))), time.monotonic())
    with MetricsServer(HERE, meters, per_rank=True) as server:
        peer = ask(server)
        assert peer.recv(9)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # with a reset
        peer.close()
        until(lambda: "went away" in caplog.text)
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_a_server_that_has_ended_has_left_its_port(meters: Meters) -> None:
    with MetricsServer(HERE, meters) as server:
        address = str(server.server_address[0]), int(server.server_address[1])
        complaint = rf"--metrics 127.0.0.1:{address[1]}: cannot listen there: Address already in use"
        with pytest.raises(UsageError, match=complaint):
            MetricsServer(address, meters)
    with MetricsServer(address, meters) as server:
        assert "rankwatch_runs 0.0" in scrape(server.url)


NO_IPV6 = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="there is no IPv6 here")


@pytest.mark.parametrize(("host", "shown_as"), [("", "0.0.0.0"), pytest.param("::1", "[::1]", marks=NO_IPV6)])
def test_other_addresses(meters: Meters, host: str, shown_as: str) -> None:
    with MetricsServer((host, 0), meters) as server:
        assert server.url.startswith(f"http://{shown_as}:")
        assert "rankwatch_runs 0.0" in scrape(server.url)


# --- the command line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("command", ["collector", "run"])
def test_a_port_that_is_taken(tmp_path: Path, command: str, taken: int) -> None:
    words = ["--", "touch", str(tmp_path / "started")] if command == "run" else ["--listen", "tcp://127.0.0.1:0"]
    done = rankwatch(command, "--runs-dir", str(tmp_path / "runs"), "--metrics", f":{taken}", *words)
    assert done.returncode == 2
    assert f"--metrics 127.0.0.1:{taken}: cannot listen there: Address already in use" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["9464", ":", ":x", ":65536", "host:-1", "::1:9464", "1:2:3"])
def test_an_address_that_is_malformed(address: str) -> None:
    for done in (rankwatch("collector", "--metrics", address), rankwatch("collector", RANKWATCH_METRICS=address)):
        assert done.returncode == 2
        assert f"argument --metrics: '{address}': expected HOST:PORT, or :PORT for this machine alone" in done.stderr


def test_an_address_that_is_not_of_this_machine() -> None:
    done = rankwatch("collector", "--metrics", "192.0.2.1:0")
    assert done.returncode == 2
    assert "--metrics 192.0.2.1:0: cannot listen there: Cannot assign requested address" in done.stderr


def test_a_command_that_reads_the_metrics_of_the_collector_round_it(tmp_path: Path) -> None:
    port = free_port()
    code = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{port}').read().decode())"
    command = ["--runs-dir", str(tmp_path / "runs"), "--", sys.executable, "-c", code]
    done = rankwatch("run", *command, RANKWATCH_METRICS=f":{port}")
    assert done.returncode == 0, done.stderr
    assert f"metrics on http://127.0.0.1:{port}/metrics" in done.stderr
    assert "rankwatch_runs 0.0" in done.stdout
