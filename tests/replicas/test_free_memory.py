from pathlib import Path

import psutil

from warmstate.replicas.free_memory import find_memory

MIB = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def machine(root: Path, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(directory: Path, names: tuple[str, str, str], limit: int | str, usage: int, cache: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def test_without_cgroups_it_is_the_machines(tmp_path: Path) -> None:
    found = find_memory(tmp_path)
    assert found.total == psutil.virtual_memory().total
    assert 0 < found.free <= found.total


def test_the_tightest_group_above_the_process_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/pods/one\n")
    mount = root / "sys/fs/cgroup"
    group(mount / "pods", V2, 64 * MIB, 60 * MIB, cache=6 * MIB)
    group(mount / "pods/one", V2, 32 * MIB, 2 * MIB)
    found = find_memory(root)
    assert (found.total, found.free) == (32 * MIB, 10 * MIB)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/one\n")
    group(root / "sys/fs/cgroup/one", V2, "max", 5 * MIB)
    assert find_memory(root).total == psutil.virtual_memory().total


def test_version_1_counts_as_well(tmp_path: Path) -> None:
    root = machine(tmp_path, "8:pids:/\n4:memory:/pods/one\n0::/\n")
    group(root / "sys/fs/cgroup/memory/pods/one", V1, 32 * MIB, 12 * MIB, cache=MIB)
    found = find_memory(root)
    assert (found.total, found.free) == (32 * MIB, 21 * MIB)


def test_a_container_that_sees_its_group_as_the_root_is_limited_too(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/not/visible/here\n")
    group(root / "sys/fs/cgroup", V2, 32 * MIB, 40 * MIB)
    assert find_memory(root).free == 0
