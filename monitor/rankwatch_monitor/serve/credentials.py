"""A collector's keys and their files: new ones or an earlier collector's, and the keys that it issues to jobs."""

from __future__ import annotations

import fcntl
import logging
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from rankwatch.errors import ConnectionFileError
from rankwatch.shared import connection as connections
from rankwatch.shared import messages, sockets
from rankwatch.shared.connection import NO_KEYS, Connection, KeyPair

from ..decide.keyring import MAX_JOBS, Keyring

log = logging.getLogger(__name__)


class Credentials:
    """Keys for the connection file at ``path``. If the file exists and its server key lies beside it, its keys and its address
    are used again: the ranks of a collector that crashed reconnect to the next one.

    Attributes:
        ring: the clients to admit.
        listening: where the earlier collector listened; empty when there was none.

    Raises:
        ConnectionFileError: a running collector uses the file, or the file is of another kind, or its server key is missing.
    """

    def __init__(self, path: Path, *, insecure: bool) -> None:
        self._path = path
        self._key_file = path.with_name(f"{path.name}.server-key")
        self._in_use: TextIO | None = None
        known = self._take_over()
        if known and (known.server == NO_KEYS) != insecure:
            raise ConnectionFileError(
                f"connection file {path} is of a collector {'with' if insecure else 'without'} encryption: remove it, "
                "or choose another --connection-file"
            )
        self.are_taken_over = known is not None
        self.listening = known.listening if known else ""
        self.server = known.server if known else NO_KEYS if insecure else sockets.new_key_pair()
        self._client = known.client if known else NO_KEYS if insecure else sockets.new_key_pair()
        self._invited = known.invited if known else []
        self.ring = Keyring(self._client)
        self.ring.recall(self._invited)

    def publish(self, address: str, listening: str, job: str) -> Connection:
        """Writes the files of a collector that listens on ``listening`` and that ranks reach at ``address``."""
        connection = Connection(address, self.server.public, self._client.public, self._client.secret, job)
        lines = [self.server.secret, listening, *self._invited]
        connections.write_private(self._key_file, "".join(f"{line}\n" for line in lines))
        connections.write(connection, self._path)
        self._in_use = open(self._key_file)  # noqa: SIM115 (held as long as the collector lives)
        fcntl.flock(self._in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return connection

    def issue(self, job: str) -> messages.Message:
        """The keys of one job, the same ones each time. They outlive this collector, as its own keys do."""
        keys = self.ring.invited(job)
        if self.server == NO_KEYS:
            return messages.Error("links are in plain text here, and keys mean nothing", "none")
        if keys is None:
            if self.ring.is_full:
                return messages.Error(f"{MAX_JOBS} jobs have keys already", "none")
            keys = sockets.new_key_pair()
            line = self.ring.invite(job, keys)
            try:
                with open(self._key_file, "a") as file:
                    file.write(f"{line}\n")
            except OSError as error:
                log.error("the keys of job %s end with this collector: cannot write %s: %s", job, self._key_file, error)
            log.info("keys made for the ranks of job %s", job)
        return messages.Invited(job, keys.public, keys.secret)

    def release(self) -> None:
        """Unlocks the files, for the next collector."""
        if self._in_use is not None:
            self._in_use.close()

    def withdraw(self) -> None:
        """Removes the files."""
        self.release()
        for path in (self._path, self._key_file):
            with suppress(OSError):
                path.unlink()

    def _take_over(self) -> _Known | None:
        """The keys and address of the collector that wrote the files; None when there are none."""
        if not self._path.exists():
            return None
        known = connections.read(self._path)
        client = KeyPair(known.client_public, known.client_secret)
        try:
            with open(self._key_file) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                secret, listening, *invited = file.read().splitlines()
                Keyring(client).recall(invited)
        except BlockingIOError:
            raise ConnectionFileError(
                f"connection file {self._path} is in use by a running collector; choose another --connection-file"
            ) from None
        except (OSError, ValueError):
            raise ConnectionFileError(
                f"connection file {self._path} belongs to another collector, whose {self._key_file.name} is not "
                "here: remove it, or choose another --connection-file"
            ) from None
        return _Known(listening, KeyPair(known.server_public, secret), client, invited)


class _Known(NamedTuple):
    listening: str
    server: KeyPair
    client: KeyPair
    invited: list[str]
