"""Jobs that run the doctor: ranks forked from one process, on this machine or on hosts of a test network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectors import PATIENCE
from jobs import SCRIPTS, environment
from ports import free_port


@dataclass
class Patient:
    """A rank to start. ``host``: a network namespace; ``clock``: its error in seconds; ``deaf``: connects, then hangs."""

    rank: int
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    clock: float = 0.0
    deaf: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The result. The code of a rank that had to be killed is None."""

    codes: list[int | None]
    out: str
    errors: str

    @property
    def json(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.out)
        return body

    def of(self, check: str, state: str) -> list[dict[str, Any]]:
        """The results of a check that have this state."""
        return [found for found in self.json["checks"] if (found["check"], found["state"]) == (check, state)]

    @property
    def failed(self) -> set[str]:
        return {found["check"] for found in self.json["checks"] if found["state"] == "fail"}


class Clinic:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        self._forge = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "doctor_forge.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # torch's store looks up each peer's name: a lost DNS query must not cost five seconds.
            env=environment(GLOO_SOCKET_IFNAME="", RES_OPTIONS="timeout:1 attempts:1"),
        )

    def see(
        self,
        folder: Path,
        world_size: int,
        patients: Sequence[Patient],
        *options: str,
        master: str = "127.0.0.1",
        port: int = 0,
    ) -> Diagnosis:
        """Runs a job of these ranks to its end, with ``--json``."""
        assert self._forge.stdin is not None
        assert self._forge.stdout is not None
        out, errors = folder / "out", folder / "errors"
        address = {"MASTER_ADDR": master, "MASTER_PORT": str(port or free_port()), "WORLD_SIZE": str(world_size)}
        for patient in patients:
            place = {"RANK": str(patient.rank), "LOCAL_RANK": str(patient.rank), "TMPDIR": str(folder)}
            order = {
                "host": patient.host,
                "env": {**address, **place, **patient.env},
                "options": ["--json", *options],
                "out": str(out),
                "errors": str(errors),
                "jump": patient.clock,
                "deaf": patient.deaf,
            }
            self._forge.stdin.write(json.dumps(order) + "\n")
        self._forge.stdin.write("\n")
        self._forge.stdin.flush()
        codes = json.loads(self._forge.stdout.readline())
        return Diagnosis(codes, out.read_text(), errors.read_text())

    def close(self) -> None:
        assert self._forge.stdin is not None
        self._forge.stdin.close()
        assert self._forge.wait(PATIENCE) == 0
