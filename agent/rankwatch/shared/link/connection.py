"""The connection file: the collector's address, and the keys for it. Only its owner can read it, from the first byte on."""

from __future__ import annotations

import ipaddress
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ...errors import ConnectionFileError
from ..printable import cleaned, printable
from ..system.private import OPEN, NotOursError, NotPrivateError, check_private

FORMAT = (1, 0)
"""Major and minor version of the file. Another major version is refused."""


class OthersFileError(ConnectionFileError):
    """The file is another user's."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85 text."""

    public: str
    secret: str


NO_KEYS = KeyPair("", "")
"""With these instead of keys, the link is in plain text."""


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach a collector. Keys are CURVE keys in Z85 (40 characters).

    ``job`` is the name for runs whose environment gives none. ``for_job_alone``: the keys are valid for that job only. With
    empty keys the link is in plain text, which is allowed on loopback only.
    """

    address: str
    server_public: str
    client_public: str
    client_secret: str
    job: str = ""
    for_job_alone: bool = False

    @property
    def is_encrypted(self) -> bool:
        return bool(self.server_public)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to this name or number."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def read(source: str | os.PathLike[str]) -> Connection:
    """The connection in the file ``source``; or in ``source`` itself, if it is the JSON text (as in the environment).

    Raises:
        ConnectionFileError: the file is missing, unreadable, readable or writable by others, malformed, or of another major
            version.
    """
    text = os.fspath(source)
    shown = printable(text)
    if "://" in text.partition("{")[0]:
        raise ConnectionFileError(
            f"{shown} is an address: give the connection file that the collector at it wrote, which has the keys too"
        )
    if text.lstrip().startswith("{"):
        return _parse(text, "the connection given as text")
    return _parse(_read_private(Path(text), shown), f"connection file {shown}")


def write(connection: Connection, path: Path) -> None:
    """Writes the file with mode 0600. The write is atomic.

    Raises:
        ConnectionFileError: the file cannot be written.
    """
    write_private(path, render(connection))


def render(connection: Connection) -> str:
    """The text of the file."""
    return json.dumps({"rankwatch_connection": list(FORMAT), **asdict(connection)}, indent=2) + "\n"


def write_private(path: Path, text: str) -> None:
    """Writes or replaces a file that only its owner can read. Raises ConnectionFileError."""
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}")  # other hosts may write the same file
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> ConnectionFileError:
    why = error.strerror if path.parent.is_dir() else f"its folder {path.parent} does not exist"
    return ConnectionFileError(f"cannot write {path}: {why}")


def _read_private(path: Path, shown: str) -> str:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | OPEN), encoding="utf-8") as file:
            check_private(file.fileno(), path)
            return file.read(1 << 16)
    except FileNotFoundError:
        raise ConnectionFileError(
            f"connection file {shown} does not exist: is the collector running, and this path on a file system both share?"
        ) from None
    except NotPrivateError as error:
        kind = OthersFileError if isinstance(error, NotOursError) else ConnectionFileError
        raise kind(f"connection file {shown} {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        kind = OthersFileError if isinstance(error, PermissionError) else ConnectionFileError
        raise kind(f"cannot read connection file {shown}: {printable(str(error))}") from None


def _parse(text: str, where: str) -> Connection:
    try:
        body = json.loads(text)
        major = body["rankwatch_connection"][0]
        given = {field.name: body.get(field.name) for field in fields(Connection)}
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConnectionFileError(f"{where} is malformed: write it anew with `rankwatch collector`") from None
    if major != FORMAT[0]:
        raise ConnectionFileError(
            f"{where} is of version {printable(str(major), 64)}, this rankwatch reads version {FORMAT[0]}: "
            "use the same release on both sides"
        )
    *texts, for_job_alone = given.values()
    is_typed = all(isinstance(text, str) for text in texts) and isinstance(for_job_alone, bool)
    if not is_typed or cleaned(texts[:4]) != texts[:4] or {len(key) for key in texts[1:4]} not in ({40}, {0}):
        raise ConnectionFileError(f"{where} is malformed: a field is missing or of a wrong type or length")
    connection = Connection(**given | {"job": printable(given["job"])})
    if not connection.is_encrypted and not is_loopback(connection.address.removeprefix("tcp://").rpartition(":")[0]):
        raise ConnectionFileError(
            f"{where} has no keys, and {connection.address} is not this machine: plain text is for loopback alone"
        )
    return connection
