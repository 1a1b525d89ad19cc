"""Owns how much memory this process may still take: what the machine has free, within the limits of its cgroups."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes: what there is in all for us, and what is left of it."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class _Files:
    """How a version of cgroups names its figures; `cache` counts file pages that go when memory is wanted."""

    limit: str
    usage: str
    cache: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def find_memory(root: Path = Path("/")) -> Memory:
    """The tightest of the machine and every cgroup (v1 or v2) above this process, as found below `root`."""
    machine = psutil.virtual_memory()
    found = [Memory(machine.total, machine.available), *_cgroups(root)]
    return Memory(min(memory.total for memory in found), min(memory.free for memory in found))


def _cgroups(root: Path) -> Iterator[Memory]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers == "":
            yield from _limits(mount, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _limits(mount / "memory", path, _V1)


def _limits(mount: Path, path: str, files: _Files) -> Iterator[Memory]:
    """Of the group and all above it. A container may see its own group as the root, whatever its path says."""
    group = mount / path.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(mount):
            break
        try:
            limit = int((directory / files.limit).read_text())
            usage = int((directory / files.usage).read_text())
            yield Memory(limit, max(0, limit - usage + _cache(directory, files)))
        except (OSError, ValueError):
            # There is no limit here ("max"), or no such group.
            continue


def _cache(directory: Path, files: _Files) -> int:
    for line in (directory / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == files.cache:
            return int(value)
    return 0
