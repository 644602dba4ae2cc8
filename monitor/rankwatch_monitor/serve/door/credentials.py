"""A collector's keys and their files: new ones or an earlier collector's, and the keys that it issues to jobs."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rankwatch.errors import ConnectionFileError
from rankwatch.shared.link import connection as connections
from rankwatch.shared.link import sockets
from rankwatch.shared.link.connection import NO_KEYS, Connection, KeyPair
from rankwatch.shared.system.private import OPEN, NotPrivateError
from rankwatch.shared.types import messages

from ...decide.keys.keyring import MAX_JOBS, Keyring
from .key_file import KeyFile

log = logging.getLogger(__name__)


class Credentials:
    """Keys for the connection file at ``path``. If the file exists and its server key lies beside it, its keys and its address
    are used again: the ranks of a collector that crashed reconnect to the next one. From the beginning to ``release`` or
    ``withdraw`` no other collector can use the files.

    Attributes:
        ring: the clients to admit.
        listening: where the earlier collector listened; empty when there was none.

    Raises:
        ConnectionFileError: a running collector uses the file, or the file is of another kind, or its server key is missing.
    """

    def __init__(self, path: Path, *, insecure: bool) -> None:
        self._path = path
        self._written = ""
        self.server = NO_KEYS
        self._key_file = _opened(path)
        self._is_new = self._key_file.is_empty
        try:
            self._begin(insecure)
        except BaseException:
            self.release()
            raise

    def _begin(self, insecure: bool) -> None:
        known = self._take_over()
        if known and (known.server == NO_KEYS) != insecure:
            raise ConnectionFileError(
                f"connection file {self._path} is of a collector {'with' if insecure else 'without'} encryption: remove it, "
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
        try:
            self._key_file.write([self.server.secret, listening, *self._invited])
        except OSError as error:
            raise connections.unwritable(self._key_file.path, error) from None
        connections.write(connection, self._path)
        self._written = connections.render(connection)
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
                self._key_file.append(line)
            except OSError as error:
                log.error("the keys of job %s end with this collector: cannot write %s: %s", job, self._key_file.path, error)
            log.info("keys made for the ranks of job %s", job)
        return messages.Invited(job, keys.public, keys.secret)

    def release(self) -> None:
        """Lets go of the files, for the next collector."""
        if self._is_new and not self._written:
            self._key_file.remove(self.server.secret)
        self._key_file.close()

    def withdraw(self) -> None:
        """Removes the files if they were published, unless another collector has put its own in their place."""
        if self._written:
            with suppress(OSError, UnicodeDecodeError):
                with open(os.open(self._path, os.O_RDONLY | OPEN), encoding="utf-8") as file:
                    is_ours = file.read(len(self._written) + 1) == self._written
                if is_ours:
                    self._path.unlink()
            self._key_file.remove(self.server.secret)
        self.release()

    def _take_over(self) -> _Known | None:
        """The keys and address of the collector that wrote the files; None when there are none."""
        if not self._path.exists():
            return None
        known = connections.read(self._path)
        client = KeyPair(known.client_public, known.client_secret)
        try:
            secret, listening, *invited = self._key_file.lines()
            Keyring(client).recall(invited)
        except (OSError, ValueError):
            raise ConnectionFileError(
                f"connection file {self._path} belongs to another collector, whose {self._key_file.path.name} is not "
                "here: remove it, or choose another --connection-file"
            ) from None
        return _Known(listening, KeyPair(known.server_public, secret), client, invited)


class _Known(NamedTuple):
    listening: str
    server: KeyPair
    client: KeyPair
    invited: list[str]


def _opened(path: Path) -> KeyFile:
    """The key file beside the connection file at ``path``. Raises ConnectionFileError."""
    key_file = path.with_name(f"{path.name}.server-key")
    try:
        return KeyFile(key_file)
    except BlockingIOError:
        raise ConnectionFileError(
            f"connection file {path} is in use by a running collector; choose another --connection-file"
        ) from None
    except NotPrivateError as error:
        raise ConnectionFileError(f"{key_file} {error}") from None
    except OSError as error:
        raise connections.unwritable(key_file, error) from None
