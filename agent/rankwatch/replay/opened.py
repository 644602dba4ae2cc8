"""A capsule on disk -> its manifest and tensors, once all checksums are right. Nothing of it is executed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import UsageError
from ..rerun.capsule.files import FORMAT, MANIFEST, SUMS, TENSORS
from ..rerun.capsule.tensor_file import BrokenTensorsError, read_tensors
from ..shared.printable import cleaned

_FILE = re.compile(r"(?:sources/)?[^/\x00]+")

_SHOWN = "name", "class", "trip", "versions", "left_out"
"""What a manifest has to show; all else is used as it is written."""


class OpenedCapsule(NamedTuple):
    path: Path
    manifest: dict[str, Any]
    tensors: dict[str, Tensor]
    sources: dict[str, str]
    """The source text of the user's modules."""
    forms: dict[int, dict[str, Any]]
    """The forms of the values that occur more than once; see ``encoding``."""


def find_capsule(path: Path) -> Path:
    """The capsule in a run's folder, or in the newest run of a folder of runs; or the path itself.

    Raises:
        UsageError: there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    run = path / "latest" if (path / "latest").is_dir() else path
    named = _named_in_report(run)
    for place in (run / named, Path(named)) if named else ():
        if (place / MANIFEST).is_file():
            return place
    found = sorted(one.parent for one in (run / "capsule").glob(f"*/{MANIFEST}"))
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{run} has {len(found)} capsules: name one of them, such as {found[0]}")
    if named:
        raise UsageError(
            f"the capsule of {run} lies at {named}, which is not here: replay it on the host that the report names"
        )
    if not path.exists():
        raise UsageError(f"{path} does not exist: give the folder of a run, or a capsule")
    raise UsageError(
        f"no capsule in {run}: its report says why there is none. A rank writes one at a trip, unless the module could not be "
        "run again, or capsule=off or closeup=0 asked for none"
    )


def _named_in_report(run: Path) -> str:
    try:
        verdict = json.loads((run / "report.json").read_text(encoding="utf-8"))["verdict"]
        return str(verdict.get("capsule") or "") if verdict else ""
    except (OSError, ValueError, KeyError, AttributeError):
        return ""


def open_capsule(path: Path) -> OpenedCapsule:
    """Reads a capsule.

    Raises:
        UsageError: it is cut short, was changed, or is of another format.
    """
    try:
        listed = (path / SUMS).read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in listed)}
        if not {MANIFEST, TENSORS} <= sums.keys() or not all(map(_FILE.fullmatch, sums)):
            raise UsageError(f"{path / SUMS} is cut short: the capsule was not copied whole")
        for name, digest in sums.items():
            _check(path / name, digest)
        manifest = json.loads(_unspawned((path / MANIFEST).read_bytes()))
        if manifest.get("format") != FORMAT:
            raise UsageError(f"{path} has the format {manifest.get('format')}, this release reads {FORMAT}")
        manifest.update(cleaned({key: manifest[key] for key in _SHOWN}))
        sources = {
            name: (path / about["source"]).read_text(encoding="utf-8")
            for name, about in manifest["code"].items()
            if about["source"] in sums
        }
        return OpenedCapsule(path, manifest, read_tensors(path / TENSORS), sources, dict(_numbered(manifest)))
    except OSError as error:
        raise UsageError(f"cannot read the capsule {path}: {error.filename or path}: {error.strerror}") from None
    except BrokenTensorsError as error:
        raise UsageError(f"{error}: copy the capsule again") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is no capsule of this release: {type(error).__name__}: {error}") from None


def _unspawned(manifest: bytes) -> bytes:
    """The script has another name in a process that multiprocessing has spawned."""
    return manifest if b'"__main__' in manifest else manifest.replace(b'"__mp_main__', b'"__main__')


def _numbered(value: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    if isinstance(value, dict) and type(value.get("id")) is int:
        yield value["id"], value
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbered(item)


def _check(file: Path, digest: str) -> None:
    found = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            found.update(piece)
    if found.hexdigest() != digest:
        size = f"{file.stat().st_size} bytes"
        raise UsageError(
            f"{file} ({size}) is not as it was written: its checksum differs. It was cut short when it was copied, or changed"
        )
