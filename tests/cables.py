"""A cable between a rank and its collector, in which a test reads, changes or holds back what passes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Cable:
    """Passes on what a rank and its collector send each other, and what ``tamper`` makes of the rank's bytes."""

    def __init__(self, port: int) -> None:
        self.tamper: Callable[[bytes], bytes] = lambda data: data
        self.seen = b""
        self.connections = 0
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                rank, _ = self._server.accept()
                self.connections += 1
                collector = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._pass, args=(rank, collector, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(collector, rank, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_ranks: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self.tamper(data) if is_ranks else data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
