"""Which keys a collector admits, and how many jobs it gives keys to."""

from __future__ import annotations

from rankwatch.shared.link.connection import KeyPair
from rankwatch_monitor.decide.keys.keyring import ANY_JOB, MAX_JOBS, Keyring


def keys(name: str) -> KeyPair:
    return KeyPair(f"public-{name}", f"secret-{name}")


def test_each_key_speaks_for_its_job_and_the_collectors_own_for_any() -> None:
    ring = Keyring(keys("own"))
    line = ring.invite("train", keys("train"))
    for known in (ring, Keyring(keys("own"))):
        known.recall([line])
        assert [known.job_of(f"public-{name}") for name in ("own", "train", "stranger")] == [ANY_JOB, "train", None]
        assert [known.admits(f"public-{name}") for name in ("own", "train", "stranger")] == [True, True, False]
        assert (known.invited("train"), known.invited("gan")) == (keys("train"), None)


def test_it_is_full_at_its_limit_and_not_before() -> None:
    ring = Keyring(keys("own"))
    for number in range(MAX_JOBS - 1):
        ring.invite(f"job-{number}", keys(str(number)))
    assert not ring.is_full
    ring.invite("job-0", keys("another"))  # again: it takes no more room
    assert not ring.is_full
    ring.invite("the last", keys("last"))
    assert ring.is_full
