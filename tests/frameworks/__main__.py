"""Runs the scripts of ``scripts/`` bare and watched, healthy and with a fault: ``python -m frameworks [NAME ...]``."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from frameworks.drill import Drill, drill
from frameworks.home import Home
from frameworks.script import Script, all_scripts


def healthy(bare: Drill, watched: Drill) -> bool:
    """Prints what a healthy training has of being watched; returns whether it has no harm of it and nothing is said."""
    for run in watched.runs:
        print(f"  watched  {run}")
    unharmed = (bare.code, bare.last_line) == (0, bare.last_line) == (watched.code, watched.last_line)
    peace = not watched.notices and not watched.said.fields and bool(watched.runs)
    print(f"  healthy  {'unharmed' if unharmed else 'HARMED'}{'' if peace else ', NOT IN PEACE'}: {said_of(watched)}")
    print(f"           bare    exit code {bare.code}, {bare.seconds:.1f} s, {bare.last_line}")
    print(f"           watched exit code {watched.code}, {watched.seconds:.1f} s, {watched.last_line}", flush=True)
    if worse := bare if bare.code else watched if watched.code else None:
        print(worse.errors)
    return unharmed and peace


def faulty(script: Script, bare: Drill, watched: Drill) -> bool:
    """Prints what is said of the fault; returns whether it is right."""
    right = script.is_right(watched.said)
    truth = ", ".join(f"{name} {'|'.join(values)}" for name, values in script.truth.items())
    print(f"  fault    {'right' if right else 'WRONG'}: {said_of(watched)}")
    print(f"           true    {truth}")
    print(f"           bare    exit code {bare.code}, {bare.seconds:.1f} s, {bare.last_line}")
    print(f"           watched exit code {watched.code}, {watched.seconds:.1f} s", flush=True)
    return right


def said_of(watched: Drill) -> str:
    said = watched.said
    where = f"run {said.fields['run']}: " if said.fields else ""
    return f"{where}{said.text}; {', '.join(said.notices) or 'no notices'}"


def check(script: Script, cache: Path, keep: Path, limit: float) -> bool:
    home, work = Home(cache, script), keep / script.name
    shutil.rmtree(work, ignore_errors=True)
    versions = ", ".join(f"{name} {home.version(name)}" for name in script.distributions)
    print(f"\n{script.name}: {versions}\n  {script.what}", flush=True)

    def done(name: str) -> Drill:
        fault, watched = "fault" in name, "watched" in name
        return drill(script, home, work / name, watched=watched, fault=fault, limit=limit)

    fine = healthy(done("bare"), done("watched"))
    return faulty(script, done("fault-bare"), done("fault-watched")) and fine


def main() -> int:
    parser = argparse.ArgumentParser(prog="frameworks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts (default: all)")
    home = Path.home() / ".cache" / "rankwatch-frameworks"
    parser.add_argument("--cache", type=Path, default=home, help="the environments (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="where outputs and records of the runs stay (default: nowhere)")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a run may take (default: %(default)s)")
    given = parser.parse_args()
    scripts = all_scripts()
    if unknown := set(given.names) - set(scripts):
        parser.error(f"no such script: {', '.join(sorted(unknown))}; there are {', '.join(scripts)}")
    with tempfile.TemporaryDirectory() as folder:
        names = given.names or list(scripts)
        failed = [name for name in names if not check(scripts[name], given.cache, given.keep or Path(folder), given.limit)]
    print(f"\n{'not as it should be: ' + ', '.join(failed) if failed else 'all as it should be'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
