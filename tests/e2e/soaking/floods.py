"""A client with a valid key sends one kind of accepted message without end, beside a healthy and an overflowing job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import greedy
from e2e.site import Site
from e2e.soaking.crew import Crew, Runs
from e2e.soaking.part import Part
from jobs import environment
from peak import peak_bytes
from rankwatch.shared.link import connection as connections
from rankwatch_monitor.serve.door import control

FLOODED = 6.0
"""Seconds at most for which a flood lasts."""

MAX_MEMORY, MAX_DISK = 3 * 2**30, 2 * 2**30
"""Bytes of the collector after one flood."""


class Floods(Part):
    def begin(self) -> None:
        kinds = sorted({*greedy.KINDS, *greedy.RAW})
        self.kinds = self.random.sample(kinds, len(kinds))
        self.sites: list[Site] = []
        self.crews: list[Crew] = []
        self.flood: subprocess.Popen[str] | None = None

    def round(self) -> None:
        kind = self.kinds[self.rounds % len(self.kinds)]
        self.counts[kind] += 1
        print(f"a flood of {kind}", flush=True)
        (folder := self.folder / str(self.rounds)).mkdir()
        site = Site([self.forge], folder)
        self.sites.append(site)
        collector = site.collect(heartbeat=0.5)
        self.crews = [Crew(self.forge, folder / job, job, [site.connection] * 2, job=job) for job in ("healthy", "bad")]
        healthy, bad = self.crews
        for crew in self.crews:
            crew.go()
            crew.is_ready()
            crew.connect()
            crew.train()
        self._start_flood(site, folder, kind)
        self.pause(0.5, 2)
        culprit = self.random.randrange(2)
        batch = bad.overflow(culprit)
        memory, disk = peak_bytes(collector.pid), _on_disk(site.runs)
        self._end_flood()
        healthy.finish()
        runs = Runs(site.runs)
        runs.check_overflow(bad, culprit, batch)
        runs.check_finished(healthy)
        assert memory < MAX_MEMORY, f"{kind}: {memory >> 20} MiB"
        assert disk < MAX_DISK, f"{kind}: {disk >> 20} MiB"
        print(f"{kind}: {memory >> 20} MiB in memory, {disk >> 20} MiB on disk", flush=True)
        assert "an error of ours" not in site.log
        site.clear()

    def end(self) -> None:
        self._end_flood()
        for crew in self.crews:
            crew.clear()
        for site in self.sites:
            site.clear()

    def _start_flood(self, site: Site, folder: Path, kind: str) -> None:
        """The key is of one job alone; only to invite, it takes a key of them all."""
        connection = site.connection
        if kind != "INVITE":
            connection = folder / "invited.json"
            connections.write(control.invite(connections.read(site.connection), greedy.JOB), connection)
        command = [sys.executable, greedy.__file__, str(connection), kind, str(FLOODED)]
        self.flood = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        assert self.flood.stdout is not None
        assert self.flood.stdout.readline() == "flooding\n"

    def _end_flood(self) -> None:
        if self.flood is not None:
            self.flood.kill()
            self.flood.communicate()
            self.flood = None


def _on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
