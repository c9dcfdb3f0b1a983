"""The memory limits of containers in trees of real files, and the warning of a sender."""

import logging
import os
from pathlib import Path

import pytest

from aiotensor import TensorSender
from aiotensor.runtime import cgroups
from aiotensor.runtime.cgroups import MemoryLimit, memory_limits, warn_if_too_large

MIB = 1 << 20
GIB = 1 << 30
V1_UNLIMITED = 0x7FFFFFFFFFFFF000


def tree(root: Path, mountinfo: str, group: str, files: dict[str, str]) -> Path:
    """Create a root with the files of control groups."""
    process = root / "proc/self"
    process.mkdir(parents=True)
    (process / "mountinfo").write_bytes(os.fsencode(mountinfo))
    (process / "cgroup").write_bytes(os.fsencode(group))
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def v2(root: Path, files: dict[str, str]) -> Path:
    mountinfo = "31 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    return tree(root, mountinfo, "0::/pod/worker\n", files)


def v1(root: Path, files: dict[str, str]) -> Path:
    mountinfo = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    return tree(root, mountinfo, "4:memory:/pod/worker\n0::/\n", files)


def test_limits_and_usage_of_a_v2_group_and_its_parents_are_read(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        {
            "pod/worker/memory.max": f"{GIB}\n",
            "pod/worker/memory.current": f"{300 * MIB}\n",
            "pod/worker/memory.stat": f"anon 1\nfile {200 * MIB}\nactive_file {MIB}\n"
            f"inactive_file {99 * MIB}\nshmem {100 * MIB}\n",
            "pod/memory.max": f"{2 * GIB}\n",
            "memory.max": "max\n",
        },
    )
    assert [*memory_limits(root)] == [
        MemoryLimit(GIB, 200 * MIB, "/sys/fs/cgroup/pod/worker/memory.max"),
        MemoryLimit(2 * GIB, 0, "/sys/fs/cgroup/pod/memory.max"),
    ]


def test_the_limit_and_usage_of_a_v1_group_are_read(tmp_path: Path) -> None:
    root = v1(
        tmp_path,
        {
            "memory/pod/worker/memory.limit_in_bytes": f"{GIB}\n",
            "memory/pod/worker/memory.usage_in_bytes": f"{300 * MIB}\n",
            "memory/pod/worker/memory.stat": f"active_file 7\ntotal_active_file {MIB}\n"
            f"total_inactive_file {99 * MIB}\n",
            "memory/memory.limit_in_bytes": f"{V1_UNLIMITED}\n",
        },
    )
    file = "/sys/fs/cgroup/memory/pod/worker/memory.limit_in_bytes"
    assert [*memory_limits(root)] == [MemoryLimit(GIB, 200 * MIB, file)]


# Names of groups and mounts: bytes that are not UTF-8, and characters that `str.split` treats as separators.
NAMES = {"latin-1": os.fsdecode(b"caf\xe9"), "blanks": "a\x85b\u2028c\x0cd\re\xa0f"}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_the_limit_of_a_group_with_an_unusual_name_is_read(tmp_path: Path, name: str) -> None:
    mountinfo = f"31 22 0:26 /{name} /sys/fs/cgroup/{name} rw - cgroup2 cgroup2 rw\n"
    group = f"1:name={name}:/\nno group\n0::/{name}/{name}\n"
    root = tree(tmp_path, mountinfo, group, {f"{name}/{name}/memory.max": f"{GIB}\n"})
    [limit] = memory_limits(root)
    assert limit.nbytes == GIB
    limit.file.encode()  # it can be written to a log


def test_blanks_that_mountinfo_escapes_are_part_of_a_path(tmp_path: Path) -> None:
    mountinfo = "31 22 0:26 / /sys/fs/cgroup/a\\040b\\011c\\134d rw - cgroup2 cgroup2 rw\n"
    root = tree(tmp_path, mountinfo, "0::/\n", {"a b\tc\\d/memory.max": f"{GIB}\n"})
    assert [*memory_limits(root)] == [MemoryLimit(GIB, 0, "/sys/fs/cgroup/a b\tc\\d/memory.max")]


ODD = {
    "nothing": ("", ""),
    "no fields": ("31\n\n - \n31 22 0:26 / /mnt rw - cgroup2\n", "0\n::\n"),
    "no group": ("31 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "worker"),
    "no such path": ("31 22 0:26 / /sys\\000 rw - cgroup2 cgroup2 rw", "0::/\0"),
    "another mount": (os.fsdecode(b"31 22 0:26 / /media/caf\xe9 rw - ext4 /dev/sdb1 rw"), "0::/"),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_a_sender_opens_despite_malformed_mounts_and_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, odd: tuple[str, str]
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tree(tmp_path, *odd, {"memory.max": "²\n"}))
    async with TensorSender(address):
        pass


async def test_a_sender_is_closed_if_logging_the_warning_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise ValueError(record.msg)

    monkeypatch.setattr(cgroups, "ROOT", v2(tmp_path, {"memory.max": "1\n"}))
    logger = logging.getLogger("aiotensor.sender")
    logger.addFilter(refuse)
    try:
        sender = TensorSender(address)
        with pytest.raises(ValueError, match="does not fit"):
            await sender.__aenter__()
        assert "closed" in repr(sender)
    finally:
        logger.removeFilter(refuse)


def test_an_arena_that_fits_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {"pod/worker/memory.max": f"{GIB}\n", "pod/worker/memory.current": f"{GIB // 2}\n"}
    warn_if_too_large("me", GIB // 2, v2(tmp_path, files))
    assert not caplog.records


def test_the_group_with_the_least_free_memory_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {
        "pod/worker/memory.max": f"{GIB}\n",
        "pod/memory.max": f"{2 * GIB}\n",
        "pod/memory.current": f"{2 * GIB - MIB}\n",
    }
    warn_if_too_large("me", 2 * MIB, v2(tmp_path, files))
    [record] = caplog.records
    assert vars(record)["file"] == "/sys/fs/cgroup/pod/memory.max"


async def test_an_arena_above_the_memory_limit_is_logged_once_when_a_sender_opens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    files = {"pod/worker/memory.max": f"{512 * MIB}\n", "pod/worker/memory.current": f"{100 * MIB}\n"}
    monkeypatch.setattr(cgroups, "ROOT", v2(tmp_path, files))
    async with TensorSender(address, arena_bytes=GIB) as sender, TensorSender(address, arena_bytes=MIB):
        pass
    [record] = caplog.records
    assert (record.name, record.levelno) == ("aiotensor.sender", logging.WARNING)
    assert {
        name: value
        for name, value in vars(record).items()
        if name in {"event", "sender_id", "arena_bytes", "limit_bytes", "used_bytes", "file"}
    } == {
        "event": "arena_too_large",
        "sender_id": sender.id,
        "arena_bytes": GIB,
        "limit_bytes": 512 * MIB,
        "used_bytes": 100 * MIB,
        "file": "/sys/fs/cgroup/pod/worker/memory.max",
    }
    assert "kernel kills a process" in record.getMessage()
