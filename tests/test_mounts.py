"""Which filesystem holds a path: what hangs must not be taken for a local disk."""

from pathlib import Path

import pytest

from ctxcache.runtime.mounts import Mount, mount_of

TABLE = r"""
/dev/sda1 / ext4 rw 0 0
/dev/sdb1 /data xfs rw 0 0
host:/export /data fuse.sshfs rw 0 0
tmpfs /data2 tmpfs rw,huge=always 0 0
host:/a /with\040blank\011tab nfs4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/etc", Mount("ext4", "rw")),
        ("/data/metadata", Mount("fuse.sshfs", "rw")),
        ("/data2/arena", Mount("tmpfs", "rw,huge=always")),
        ("/with blank\ttab/data", Mount("nfs4", "rw")),
    ],
)
def test_the_last_mount_at_the_longest_place_holds_a_path(tmp_path: Path, path: str, mount: Mount) -> None:
    """Also where two lie on one place, and where its name is escaped."""
    table = tmp_path / "mounts"
    table.write_text(TABLE.lstrip())

    assert mount_of(path, table) == mount


def test_a_system_without_mounts_says_nothing(tmp_path: Path) -> None:
    """It has no kernel that could say it."""
    assert mount_of("/etc", tmp_path / "none") == Mount()
