"""A node's way to the collector: a proxy that can stop to carry anything, as a network does that is cut."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

from rankwatch.shared.link import connection as connections


class Proxy:
    """Between ranks and the collector of the connection file ``source``. ``connection``: the ranks' own file.

    While it is cut, connections stay open and nothing passes; afterwards all that was sent arrives.
    """

    def __init__(self, source: Path, connection: Path) -> None:
        behind = connections.read(source)
        self._host, _, self._port = behind.address.removeprefix("tcp://").rpartition(":")
        self._passes = threading.Event()
        self._passes.set()
        self._loop = asyncio.new_event_loop()
        server = self._loop.run_until_complete(asyncio.start_server(self._carry, "127.0.0.1", 0))
        self.connection = connection
        port = server.sockets[0].getsockname()[1]
        connections.write(replace(behind, address=f"tcp://127.0.0.1:{port}"), connection)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def cut(self) -> None:
        self._passes.clear()

    def mend(self) -> None:
        self._passes.set()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            further = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass_on(reader, further[1]), self._pass_on(further[0], writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                while not self._passes.is_set():
                    await asyncio.sleep(0.01)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
