"""A small archive of a year: what stands out in it, and that memory does not grow with it."""

from __future__ import annotations

from pathlib import Path

import pytest

import fleets
from benchmarks import fleet as benchmark

pytestmark = pytest.mark.slow


def test_a_year_of_a_small_site(tmp_path: Path) -> None:
    fleets.write(str(tmp_path / "small"), 1_000, hosts=24, jobs=4, days=60)
    fleets.write(str(tmp_path / "large"), 10_000, hosts=24, jobs=4, days=365)
    small, large = benchmark.ask(str(tmp_path / "small")), benchmark.ask(str(tmp_path / "large"))
    assert large.found["runs"] == 10_000
    bad, bad_host = fleets.gpu_name(*fleets.BAD_GPU), fleets.host_name(fleets.BAD_HOST)
    gpus, hosts = benchmark.standing_out(large.found["gpus"]), benchmark.standing_out(large.found["hosts"])
    assert [name for name, through in gpus.items() if not through] == [bad]
    assert {host for through in gpus.values() for host in through} == {bad_host}
    assert hosts == {fleets.host_name(fleets.BAD_GPU[0]): [bad], bad_host: []}
    assert len(large.found["gpus"]["found"]) > 100  # by chance
    assert large.mib < min(500, 2 * small.mib + 100)
