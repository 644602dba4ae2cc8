"""The run and the ranks of an exported record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankwatch.shared.types import messages

from ...decide.core.journal import Opened
from ...record.reader import RunRecord
from ...record.schema import StoreError


@dataclass(frozen=True, slots=True)
class Origin:
    """A run; ``hosts`` has the host and local rank of each rank that connected."""

    run: str
    job: str
    restart: int
    world_size: int
    hosts: Mapping[int, tuple[str, int]]


def origin_of(record: RunRecord) -> Origin:
    """The origin of a record. Raises StoreError."""
    opened, hosts = None, {}
    for _, entry in record.events("opened", "hello"):
        if isinstance(entry.fact, Opened):
            opened = entry.fact
        elif isinstance(entry.fact, messages.Hello):
            hosts[entry.fact.rank] = entry.fact.host, entry.fact.local_rank
    if opened is None:
        raise StoreError(f"the record {record.path}: it does not say whose it is", record.path)
    if max(hosts, default=0) >= opened.world_size:
        raise StoreError(f"the record {record.path}: rank {max(hosts)} of {opened.world_size} ranks", record.path)
    name = record.meta().get("run", record.run)
    return Origin(name, opened.job, opened.restart, opened.world_size, hosts)
