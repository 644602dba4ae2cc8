"""Whether a file lies on a network file system, where SQLite's write-ahead log does not work: its index is shared memory, which
two hosts do not share."""

from __future__ import annotations

import re
from pathlib import Path

NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"),
    *(
        "nfs3",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "quobyte",
        "smb2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "wekafs",
    ),
}
"""Types of file systems that other hosts may have mounted. All of FUSE's count too, save those of one machine."""

FUSE_OF_ONE_MACHINE = {"fuseblk", "fuse.lxcfs", "fuse.fuse-overlayfs", "fuse.portal", "fuse.gvfsd-fuse"}

MOUNTS = Path("/proc/self/mountinfo")


def is_on_network(path: Path) -> bool:
    """Whether other hosts may have this file, or the folder in which it will be; False where nobody can say."""
    try:
        return is_network(type_of(str(path.resolve()), MOUNTS.read_text(errors="surrogateescape")))
    except (OSError, RuntimeError):
        return False


def is_network(kind: str) -> bool:
    is_fuse = kind == "fuse" or kind.startswith("fuse.")
    return kind in NETWORK or (is_fuse and kind not in FUSE_OF_ONE_MACHINE)


def type_of(path: str, mounts: str) -> str:
    """The type of the file system of an absolute ``path`` without links, by the text of a mountinfo; empty: unknown.

    The longest mount point above the path counts, and of several at one place the last, which lies on top.
    """
    longest, kind = -1, ""
    for line in mounts.split("\n"):
        fields = line.split(" ")
        if len(fields) < 7 or "-" not in fields[6:]:
            continue
        point = _unescaped(fields[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        rest = fields[fields.index("-", 6) + 1 :]
        if is_above and rest and len(point) >= longest:
            longest, kind = len(point), rest[0]
    return kind


def _unescaped(field: str) -> str:
    """Mountinfo writes blanks, tabs, newlines and backslashes in octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
