"""Which file systems have no write-ahead log, and how records are written and read there."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import makers
import records
from jobs import environment
from rankwatch_monitor.decide.core.journal import NO_RANK, Entry, Opened, Trained
from rankwatch_monitor.record import mounts
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE, StoreError
from rankwatch_monitor.record.store import Store

TABLE = makers.table()

SAMPLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
40 27 0:40 / /home rw,relatime shared:20 master:3 - nfs4 filer:/home rw,vers=4.2,local_lock=none
41 40 254:1 /local /home/scratch rw,relatime - xfs /dev/sdb rw
42 27 0:42 / /lustre\040one rw,relatime - lustre 10.0.0.1@o2ib:/one rw,flock
43 27 0:43 / /mnt rw - autofs systemd-1 rw,fd=30
44 43 0:44 / /mnt rw - cifs //server/share rw
45 27 0:45 /project /work/bound rw - nfs4 filer:/home rw
46 27 0:46 / /var/merged rw - overlay overlay rw,lowerdir=/a - b,upperdir=/u
47 27 0:47 / /ssh rw,nosuid - fuse.sshfs me@host: rw
48 27 254:9 / /usb rw - fuseblk /dev/sdc rw
49 27 0:49 / /tab\011and\134slash rw - beegfs beegfs_nodev rw
50 27 0:50 / /homely rw - btrfs /dev/sdd rw
a line that says nothing
51 27 0:51 / /cut
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/", "ext4", False),
        ("/root/runs", "ext4", False),
        ("/home", "nfs4", True),
        ("/home/me/runs/train-0/run.db", "nfs4", True),
        ("/home/scratch/runs", "xfs", False),
        ("/home/scratchy/runs", "nfs4", True),
        ("/homely/runs", "btrfs", False),
        ("/lustre one/runs", "lustre", True),
        ("/mnt/runs", "cifs", True),
        ("/work/bound/runs", "nfs4", True),
        ("/var/merged/runs", "overlay", False),
        ("/ssh/runs", "fuse.sshfs", True),
        ("/usb/runs", "fuseblk", False),
        ("/tab\tand\\slash/runs", "beegfs", True),
        ("/cut/runs", "ext4", False),
    ],
)
def test_the_mount_that_lies_on_top_decides(path: str, kind: str, network: bool) -> None:
    assert mounts.type_of(path, SAMPLE) == kind
    assert mounts.is_network(kind) == network


def test_nobody_says_where_a_file_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mounts.type_of("/home", "") == ""
    assert not mounts.is_on_network(tmp_path)  # of this machine
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "nothing")
    assert not mounts.is_on_network(tmp_path)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this process takes for one of another host."""
    (tmp_path / "mounts").write_text(f"40 27 0:40 / {tmp_path} rw - nfs4 filer:/home rw\n")
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mounts")
    return tmp_path


def trained(batch: int) -> Entry:
    return Entry(0.0, 0, Trained(batch + 1, makers.summary(batch), TABLE))


def test_on_a_network_file_system_readers_and_the_writer_wait_for_each_other(network: Path) -> None:
    store = Store(network / FILE)
    store.write([Entry(0.0, NO_RANK, Opened("train", 0, 1))], 1.0)
    assert not (network / f"{FILE}-shm").exists()
    seen: list[int] = []
    errors: list[StoreError] = []
    is_done = threading.Event()

    def read() -> None:
        try:
            while not is_done.is_set():
                with RunRecord(network / FILE) as record:
                    seen.append(len(record.digests()))
        except StoreError as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for batch in range(60):
        store.write([trained(batch)], 1.0)
    is_done.set()
    for reader in readers:
        reader.join()
    store.close()
    assert errors == []
    assert seen
    assert records.read(network / FILE, RunRecord.digests)["batch"].tolist() == list(range(60))
    assert sorted(path.name for path in network.iterdir()) == ["mounts", FILE]


def test_a_record_with_a_write_ahead_log_goes_on_without_one(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as local:
        local.setattr(mounts, "MOUNTS", network / "nothing")
        records.add(network, Entry(0.0, NO_RANK, Opened("train", 0, 1)), trained(0), at=1.0)
    records.add(network, trained(1), at=1.0)
    assert records.read(network / FILE, RunRecord.digests)["batch"].tolist() == [0, 1]
    with sqlite3.connect(network / FILE) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)


KILLED = """
import os, signal, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute(f"PRAGMA journal_mode = {sys.argv[2]}")
database.execute("PRAGMA cache_size = 1")
database.execute("BEGIN IMMEDIATE")
database.execute("UPDATE meta SET value = 'half'")
database.execute("CREATE TABLE more (x)")
for _ in range(2000):
    database.execute("INSERT INTO more VALUES (?)", ["x" * 500])
if sys.argv[3] == "commit":
    database.execute("COMMIT")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def shelf() -> Iterator[Path]:
    """A folder that other users can reach."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        Path(folder).chmod(0o755)


def batches_seen_by_a_colleague(folder: Path) -> list[int]:
    """What a user reads who cannot write to the folder."""
    folder.chmod(0o555)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            os.write(write_end, bytes(records.read(folder / FILE, RunRecord.digests)["batch"].tolist()))
        except StoreError:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        return list(pipe.read())


def test_a_record_that_is_over_is_read_where_nothing_can_be_written(shelf: Path) -> None:
    records.add(shelf, Entry(0.0, NO_RANK, Opened("train", 0, 1)), trained(7), at=1.0)
    assert batches_seen_by_a_colleague(shelf) == [7]


@pytest.mark.parametrize(("journal", "end"), [("TRUNCATE", ""), ("TRUNCATE", "commit"), ("WAL", "commit")])
def test_what_a_killed_writer_left_is_read_and_left_alone(shelf: Path, journal: str, end: str) -> None:
    records.add(shelf, Entry(0.0, NO_RANK, Opened("train", 0, 1)), trained(7), at=1.0, run="train-0")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(shelf / FILE), journal, end], env=environment())
    assert killed.returncode == -signal.SIGKILL
    (shelf / f"{FILE}-shm").unlink(missing_ok=True)
    left = {path.name: path.read_bytes() for path in shelf.iterdir()}
    assert len(left) == 2
    assert batches_seen_by_a_colleague(shelf) == [7]
    assert {path.name: path.read_bytes() for path in shelf.iterdir()} == left
