"""The checks of memory, on simulated machines that consist of files."""

from pathlib import Path
from resource import RLIM_INFINITY

import pytest

from aiotensor.cli.doctor.finding import Status
from aiotensor.cli.doctor.memory import (
    available_memory,
    cgroup_limit,
    commit_limit,
    dev_shm,
    huge_pages,
    mapped_bytes,
    open_files,
    process_limits,
    subscribers,
)

GIB = 1 << 30
V1_UNLIMITED = 0x7FFFFFFFFFFFF000
V2 = "31 22 0:26 {root} {at} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} {at} rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
OTHER = "22 27 0:21 / /proc rw,relatime - proc proc rw\n"


def machine(root: Path, *, mounts: str, groups: str, limits: dict[str, str]) -> Path:
    """Write the files of /proc that describe cgroups, and the files with the limits."""
    process = root / "proc/self"
    process.mkdir(parents=True)
    (process / "mountinfo").write_text(OTHER + mounts)
    (process / "cgroup").write_text(groups)
    for name, text in limits.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def v2(root: Path, limits: dict[str, str], *, group: str = "/a.slice/b.service") -> Path:
    limits = {f"sys/fs/cgroup{name}/memory.max": text for name, text in limits.items()}
    mounts = V2.format(root="/", at="/sys/fs/cgroup")
    return machine(root, mounts=mounts, groups=f"0::{group}\n", limits=limits)


def test_a_cgroup_without_a_limit_is_ok(tmp_path: Path) -> None:
    finding = cgroup_limit(GIB, v2(tmp_path, {"/a.slice": "max", "/a.slice/b.service": "max"}))

    assert (finding.status, finding.found) == (Status.OK, "no limit")


def test_a_machine_without_cgroups_or_without_proc_has_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit(GIB, tmp_path).found == "no limit"


@pytest.mark.parametrize(
    ("limit", "status"),
    [
        (8 * GIB, Status.OK),
        (GIB + (512 << 20), Status.OK),
        (GIB + (511 << 20), Status.NOTE),
        (1, Status.NOTE),
    ],
)
def test_a_memory_limit_must_cover_the_arena_and_the_processes(
    limit: int, status: Status, tmp_path: Path
) -> None:
    finding = cgroup_limit(GIB, v2(tmp_path, {"/a.slice/b.service": str(limit)}))

    assert finding.status is status
    assert "(/sys/fs/cgroup/a.slice/b.service/memory.max)" in finding.found
    assert "an arena of 1.0 GiB" in finding.found
    assert (finding.advice is None) == (status is Status.OK)


def test_another_arena_is_compared_with_the_same_limit(tmp_path: Path) -> None:
    root = v2(tmp_path, {"/a.slice/b.service": str(2 * GIB)})

    assert cgroup_limit(GIB, root).status is Status.OK
    assert cgroup_limit(2 * GIB, root).status is Status.NOTE


def test_the_lowest_limit_of_all_ancestors_applies(tmp_path: Path) -> None:
    limits = {"": "max", "/a.slice": str(GIB // 2), "/a.slice/b.service": str(4 * GIB), "/other": "1"}
    finding = cgroup_limit(GIB, v2(tmp_path, limits))

    assert finding.status is Status.NOTE
    assert finding.found.startswith("a limit of 512.0 MiB (/sys/fs/cgroup/a.slice/memory.max)")


def test_the_limit_of_a_v1_memory_cgroup_is_found_among_the_others(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        mounts=V1_CPU
        + V1.format(root="/", at="/sys/fs/cgroup/memory")
        + V2.format(root="/", at="/sys/fs/cgroup/unified"),
        groups="9:name=systemd:/\n5:cpu,cpuacct:/c\n4:memory:/jobs/7\n0::/\n",
        limits={
            "sys/fs/cgroup/cpu/memory.limit_in_bytes": "1",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(V1_UNLIMITED),
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": str(V1_UNLIMITED),
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": str(GIB),
        },
    )
    finding = cgroup_limit(GIB, root)

    assert finding.status is Status.NOTE
    assert "1.0 GiB (/sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes)" in finding.found


@pytest.mark.parametrize("group", ["/docker/abc", "/", "/../../elsewhere"])
def test_a_container_sees_its_own_limit_where_it_is_mounted(group: str, tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        mounts=V1.format(root="/docker/abc", at="/sys/fs/cgroup/memory"),
        groups=f"4:memory:{group}\n",
        limits={"sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000"},
    )

    assert "976.6 KiB (/sys/fs/cgroup/memory/memory.limit_in_bytes)" in cgroup_limit(GIB, root).found


def test_a_mount_point_may_have_blanks_in_its_name(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        mounts="too short\n" + V2.format(root="/", at=r"/my\040groups"),
        groups="0::/\n",
        limits={"my groups/memory.max": "4096"},
    )

    assert "4.0 KiB (/my groups/memory.max)" in cgroup_limit(GIB, root).found


@pytest.mark.parametrize(("kib", "status"), [(1 << 20, Status.OK), ((1 << 20) - 1, Status.NOTE)])
def test_available_memory_is_compared_with_the_arena(kib: int, status: Status, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:  99 kB\nMemAvailable:   {kib} kB\nBuffers:  1 kB\n")

    finding = available_memory(GIB, tmp_path)

    assert finding.status is status
    assert finding.found.startswith("1.0 GiB available" if status is Status.OK else "1024.0 MiB available")


def test_unknown_available_memory_is_a_note(tmp_path: Path) -> None:
    assert available_memory(GIB, tmp_path).status is Status.NOTE


@pytest.mark.parametrize(
    ("address_space", "file_size", "found"),
    [
        (RLIM_INFINITY, RLIM_INFINITY, None),
        (6 * GIB, GIB, None),
        (6 * GIB - 1, GIB, "4.0 GiB left (ulimit -v), but a receiver needs 4.0 GiB for each sender"),
        (3 * GIB, GIB, "1.0 GiB left (ulimit -v), but a receiver needs 4.0 GiB for each sender, and a"),
        (GIB, RLIM_INFINITY, "0 bytes left (ulimit -v), but"),
        (RLIM_INFINITY, GIB - 1, "files of at most 1024.0 MiB (ulimit -f): too"),
        (GIB, 0, "for its publisher; files of at most 0 bytes (ulimit -f): too"),
    ],
)
def test_limits_of_the_process_are_compared_with_the_arena(
    address_space: int, file_size: int, found: str | None
) -> None:
    finding = process_limits(GIB, address_space, 2 * GIB, file_size)

    assert finding.status is (Status.OK if found is None else Status.NOTE)
    assert found is None or found in finding.found


@pytest.mark.parametrize(
    ("soft", "hard", "advice"),
    [
        (64, 64, None),
        (RLIM_INFINITY, RLIM_INFINITY, None),
        (63, 64, "ulimit -n 64 "),
        (63, 4096, "ulimit -n 1024 "),
        (63, RLIM_INFINITY, "ulimit -n 1024 "),
        (10, 63, "hard limit"),
    ],
)
def test_fewer_than_64_descriptors_are_a_note(soft: int, hard: int, advice: str | None) -> None:
    finding = open_files(soft, hard)

    assert finding.status is (Status.OK if advice is None else Status.NOTE)
    assert finding.advice is None if advice is None else advice in (finding.advice or "")


@pytest.mark.parametrize(
    ("soft", "count", "fitting"),
    [(RLIM_INFINITY, 10_000, None), (192, 64, None), (191, 64, 63), (64, 1, 0), (10, 1, 0)],
)
def test_each_subscriber_needs_two_descriptors(soft: int, count: int, fitting: int | None) -> None:
    finding = subscribers(soft, count)

    assert finding.status is (Status.OK if fitting is None else Status.NOTE)
    assert fitting is None or f"for about {fitting} of one publisher" in finding.found


@pytest.mark.parametrize(
    ("mode", "used_gib", "status", "found"),
    [
        ("0", 9, Status.OK, "none for the private mappings"),
        ("1", 9, Status.OK, "none for the private mappings"),
        ("2", 4, Status.OK, "4.0 GiB left of the commit limit (vm.overcommit_memory=2), enough"),
        ("2", 5, Status.NOTE, "3.0 GiB left of the commit limit (vm.overcommit_memory=2), but each"),
        ("2", 9, Status.NOTE, "0 bytes left"),
    ],
)
def test_a_subscriber_maps_four_times_the_arena_within_the_commit_limit(
    mode: str, used_gib: int, status: Status, found: str, tmp_path: Path
) -> None:
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/overcommit_memory").write_text(f"{mode}\n")
    (tmp_path / "proc/meminfo").write_text(
        f"CommitLimit:    {8 << 20} kB\nCommitted_AS:   {used_gib << 20} kB\n"
    )

    finding = commit_limit(GIB, tmp_path)

    assert finding.status is status
    assert found in finding.found


def test_a_machine_without_proc_has_no_commit_limit(tmp_path: Path) -> None:
    assert commit_limit(GIB, tmp_path).status is Status.OK


def test_the_size_of_dev_shm_does_not_matter(tmp_path: Path) -> None:
    there, missing = dev_shm(tmp_path), dev_shm(tmp_path / "missing")

    assert there.status is missing.status is Status.OK
    assert "iB; irrelevant" in there.found
    assert missing.found.startswith("missing; irrelevant")


def test_the_setting_for_huge_pages_is_shown(tmp_path: Path) -> None:
    assert "not supported" in huge_pages(tmp_path).found
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    file.parent.mkdir(parents=True)
    file.write_text("always within_size [advise] never deny force\n")

    assert '"advise"' in huge_pages(tmp_path).found


def test_mapped_memory_is_counted_in_bytes(tmp_path: Path) -> None:
    assert mapped_bytes() > 1 << 20
    assert mapped_bytes(tmp_path) == 0
