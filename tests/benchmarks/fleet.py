"""How long an archive of a year takes to answer, and with how much memory.

    python tests/benchmarks/fleet.py [--runs 100000] [--hosts 128] [--jobs 20] [--unmerged] [--keep FOLDER]

The runs are invented (tests/fleets.py), with a bad GPU and a bad host among many that are bad by chance. ``rankwatch fleet`` runs
in a process of its own. --unmerged: a file for each run, as an archive is that nobody merges.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

import fleets
from jobs import environment


class Answer(NamedTuple):
    """What ``rankwatch fleet --json`` said, in how many seconds, with how much memory at most."""

    found: dict[str, Any]
    seconds: float
    mib: float


ASK = """
import sys
from peak import peak_bytes
from rankwatch_monitor.cli import main
code = main(["fleet", sys.argv[1], "--json"])
print(peak_bytes(), file=sys.stderr)
sys.exit(code)
"""


def ask(url: str) -> Answer:
    env = environment(PYTHONPATH=os.pathsep.join([environment()["PYTHONPATH"], str(ROOT / "tests")]))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ASK, url], env=env, capture_output=True, text=True, check=True)
    seconds = time.monotonic() - began
    return Answer(json.loads(done.stdout), seconds, int(done.stderr.splitlines()[-1]) / 2**20)


def standing_out(machines: dict[str, Any]) -> dict[str, list[str]]:
    """By name, through what."""
    return {one["name"]: one["through"] for one in machines["found"] if one["stands_out"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--hosts", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--unmerged", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the archive there, or ask the one that is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary) / "archive"
        if not folder.is_dir():
            began = time.monotonic()
            fleets.write(
                str(folder), arguments.runs, hosts=arguments.hosts, jobs=arguments.jobs, merged=not arguments.unmerged
            )
            print(f"written in {time.monotonic() - began:.0f} s")
        sizes = [path.stat().st_size for path in folder.rglob("*.parquet")]
        for _ in range(2):
            found, seconds, mib = ask(str(folder))
            print(
                f"{found['runs']:,} runs in {len(sizes):,} files of {sum(sizes) / 2**20:.0f} MiB: {seconds:.1f} s, {mib:.0f} MiB"
            )
        for what in ("gpus", "hosts"):
            machines = found[what]
            print(f"  {machines['count']:,} {what}, {machines['incidents']:,} incidents; stand out:")
            for name, through in standing_out(machines).items():
                print(f"    {name}" + (f", through {through[0]}" if through else ""))


if __name__ == "__main__":
    main()
