"""The amount of free memory, by all the limits that the system reports."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.node_memory.limits import MemoryLimit, rooms
from tests.store.test_posix_storage import mounted

MIB = 1 << 20
V2_MOUNT = "30 1 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
V1_MOUNT = "33 1 0:29 {root} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n"


class System:
    """The ``proc`` and ``sys`` of a machine that is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("proc/meminfo", f"MemTotal: 64000 kB\nMemAvailable: {100 * 1024} kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def cgroup(self, path: str, limit: str, usage: int, stat: str = "") -> None:
        self.write(f"sys/fs/cgroup/{path}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup/{path}/memory.current", f"{usage}\n")
        self.write(f"sys/fs/cgroup/{path}/memory.stat", stat)

    def cgroup_v1(self, path: str, limit: int, usage: int, stat: str = "") -> None:
        self.write(f"sys/fs/cgroup/memory/{path}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"sys/fs/cgroup/memory/{path}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"sys/fs/cgroup/memory/{path}/memory.stat", stat)

    def tightest(self) -> MemoryLimit:
        return rooms(self.path, system=self.path)[0]


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_without_cgroups_the_machine_and_the_file_system_are_what_bounds(system: System) -> None:
    assert system.tightest() == MemoryLimit(100 * MIB, "the machine's available memory")
    assert len(rooms(system.path, system=system.path)) == 2


def test_a_cgroup_far_above_bounds_too(system: System) -> None:
    system.write("proc/self/cgroup", "0::/jobs/gpt/rank0\n")
    system.write("proc/self/mountinfo", V2_MOUNT)
    system.cgroup("jobs/gpt/rank0", "max", 10 * MIB)
    system.cgroup("jobs/gpt", str(60 * MIB), 10 * MIB)
    system.cgroup("jobs", str(40 * MIB), 30 * MIB)
    room = system.tightest()
    assert room.free_nbytes == 10 * MIB
    assert room.what.startswith("memory.max of the cgroup")
    assert room.what.endswith("sys/fs/cgroup/jobs'")


def test_pages_of_files_on_disk_are_given_up_and_so_are_room(system: System) -> None:
    system.write("proc/self/cgroup", "0::/\n")
    system.write("proc/self/mountinfo", V2_MOUNT)
    stat = f"anon 5\ninactive_anon {9 * MIB}\nactive_file {2 * MIB}\ninactive_file {3 * MIB}\nshmem {9 * MIB}\n"
    system.cgroup("", str(40 * MIB), 30 * MIB, stat)
    assert system.tightest().free_nbytes == 15 * MIB


def test_a_cgroup_that_is_over_its_limit_leaves_nothing(system: System) -> None:
    system.write("proc/self/cgroup", "0::/\n")
    system.write("proc/self/mountinfo", V2_MOUNT)
    system.cgroup("", str(10 * MIB), 11 * MIB)
    assert system.tightest().free_nbytes == 0


def test_cgroups_of_the_first_version_count_what_is_below_them_and_may_have_no_limit(system: System) -> None:
    system.write("proc/self/cgroup", "12:cpu,cpuacct:/x\n9:memory:/slurm/job_7\n1:name=systemd:/x\n")
    system.write("proc/self/mountinfo", V1_MOUNT.format(root="/"))
    system.cgroup_v1("", 9223372036854771712, 30 * MIB)
    system.cgroup_v1("slurm", 50 * MIB, 30 * MIB, f"inactive_file 0\ntotal_inactive_file {4 * MIB}\n")
    system.cgroup_v1("slurm/job_7", 48 * MIB, 20 * MIB)
    assert system.tightest() == MemoryLimit(
        24 * MIB, f"memory.limit_in_bytes of the cgroup '{system.path}/sys/fs/cgroup/memory/slurm'"
    )


@pytest.mark.parametrize("root", ["/docker/abc", "/docker/abc/inner"])
def test_in_a_container_that_sees_only_its_own_cgroup_this_bounds(system: System, root: str) -> None:
    system.write("proc/self/cgroup", "9:memory:/docker/abc\n")
    system.write("proc/self/mountinfo", V1_MOUNT.format(root=root))
    system.cgroup_v1("", 20 * MIB, 5 * MIB)
    assert system.tightest().free_nbytes == 15 * MIB


def test_a_small_file_system_in_memory_bounds(tmp_path: Path) -> None:
    with mounted(tmp_path / "shm", "tmpfs", "size=64m") as folder:
        (folder / "other").write_bytes(bytes(16 * MIB))
        room = rooms(folder)[0]
    assert room == MemoryLimit(48 * MIB, f"the size of the file system at '{folder}'")


def test_the_limit_of_locked_memory_counts_where_memory_is_locked(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.write("proc/self/status", "Name: python\nVmLck: 1024 kB\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert rooms(system.path, locked=True, system=system.path)[0] == MemoryLimit(
        7 * MIB, "the limit of locked memory (ulimit -l)"
    )
    assert system.tightest().free_nbytes == 100 * MIB
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # whom the limit does not hold for
    assert rooms(system.path, locked=True, system=system.path)[0].free_nbytes == 100 * MIB


def test_a_real_cgroup_bounds_the_processes_in_it() -> None:
    top = Path("/sys/fs/cgroup/memory")
    if os.geteuid() != 0 or not (top / "memory.limit_in_bytes").exists():
        pytest.skip("no cgroups of the first version that this user may make")
    group = top / f"holdfast-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(300 * MIB))
        script = (
            "import os; from pathlib import Path;"
            f"Path('{group}/cgroup.procs').write_text(str(os.getpid()));"
            "from holdfast.node_memory.limits import rooms; room = rooms(Path('/dev/shm'))[0];"
            "print(room.free_nbytes, room.what)"
        )
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    finally:
        group.rmdir()
    free, what = done.stdout.rstrip().split(" ", 1)
    assert 100 * MIB < int(free) <= 300 * MIB
    assert what == f"memory.limit_in_bytes of the cgroup '{group}'"
