"""Meters over HTTP, for Prometheus. A client that reads slowly, or not at all, blocks one thread of this server only."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from socketserver import ThreadingTCPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric, Sample

from rankwatch.errors import UsageError

from . import families as metrics
from .meters import Meters, Readout

log = logging.getLogger(__name__)

MAX_SCRAPES = 8
"""Connections at a time. Each takes a file descriptor, which the ranks need too; further ones are closed."""

TIMEOUT = 10.0
"""Seconds for a client to send its request, and to receive the answer."""

AT_ONCE, REST = 256, 0.001
"""Samples written in a row, and the seconds of sleep after them. Without the sleep the collector's loop would wait for the
interpreter with each message, and to write the samples of 16,384 ranks takes half a second."""

PAUSE = 1.0
"""Seconds until the next accept, after one failed for want of a file descriptor."""


class MetricsServer(ThreadingTCPServer):
    """Listens on construction; answers, in its own threads, while it is entered.

    Args:
        address: host (empty: all interfaces) and port; port 0 picks a free one.
        per_rank: whether each rank has metrics too.

    Raises:
        UsageError: the address cannot be listened on.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], meters: Meters, *, per_rank: bool = False) -> None:
        registry = CollectorRegistry()
        registry.register(_Families(meters, per_rank))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._room = threading.Semaphore(MAX_SCRAPES)
        self._thread = threading.Thread(target=self.serve_forever, name="rankwatch-metrics", daemon=True)
        host, port = address
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, place = next((each for each in found if each[0] == socket.AF_INET), found[0])
            super().__init__(place, _Handler.factory(registry))  # type: ignore[arg-type]
        except OSError as error:
            raise UsageError(f"--metrics {host or '*'}:{port}: cannot listen there: {error.strerror}") from None

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}/metrics"

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()
        self.server_close()

    # --- what socketserver asks for -------------------------------------------------------------------------------

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE)  # no descriptor is left: the client still waits, and accept would fail at once again and again
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log.debug("metrics: %s went away: %s", client_address, error)
        else:
            log.exception("an error of ours while metrics were served")


class _Handler(MetricsHandler):
    timeout = TIMEOUT


class _Unhurried(list[Sample]):
    """Samples, with a sleep after each AT_ONCE of them."""

    def __iter__(self) -> Iterator[Sample]:
        for start in range(0, len(self), AT_ONCE):
            if start:
                time.sleep(REST)
            yield from self[start : start + AT_ONCE]


class _Families:
    """The source that prometheus_client collects from."""

    def __init__(self, meters: Meters, per_rank: bool) -> None:
        self._meters = meters
        self._per_rank = per_rank

    def collect(self) -> Iterator[Metric]:
        for metric in metrics.families(self._meters.read(time.monotonic()), per_rank=self._per_rank):
            metric.samples = _Unhurried(metric.samples)
            yield metric

    def describe(self) -> Iterator[Metric]:
        return metrics.families(Readout(), per_rank=self._per_rank)
