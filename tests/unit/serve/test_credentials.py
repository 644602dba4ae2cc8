"""The keys that a collector issues to jobs."""

from __future__ import annotations

from pathlib import Path

from rankwatch.shared import messages
from rankwatch.shared.connection import KeyPair
from rankwatch_monitor.serve.credentials import Credentials


def test_more_jobs_than_a_collector_has_room_for_get_no_keys(tmp_path: Path) -> None:
    keys = Credentials(tmp_path / "connection.json", insecure=False)
    for number in range(4095):
        keys.ring.invite(f"job-{number}", KeyPair(f"public-{number}", f"secret-{number}"))
    last = keys.issue("the last")
    assert isinstance(last, messages.Invited)
    assert keys.issue("one more") == messages.Error("4096 jobs have keys already", "none")
    assert keys.ring.invited("one more") is None
    assert keys.issue("the last") == last  # a job that has keys gets the same ones
    assert keys.issue("job-7") == messages.Invited("job-7", "public-7", "secret-7")
