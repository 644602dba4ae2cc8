"""A launch of torchrun's agents is one run, also where a rank died before it watched, and nodes come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.soaking.launches import WAYS, launch

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("how", WAYS)
def test_what_goes_bad_on_one_rank_stops_all_ranks_of_its_launch(tmp_path: Path, how: str) -> None:
    """Each rank has said that it was finite, so all are of the run with the verdict."""
    launch(tmp_path, how)
