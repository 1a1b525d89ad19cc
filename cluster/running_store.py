"""Owns how the commands of a user find the embedded store of an application of theirs on this machine.

The store deployment leaves a file that only its user can read, and takes it away when it ends; the file of one that was
killed is told by its process. Knows no Ray.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

_DIRECTORY_VARIABLE = "XDG_RUNTIME_DIR"


@dataclass(frozen=True, slots=True)
class RunningStore:
    """Where an embedded store listens; `repr` never shows the password."""

    url: str
    password: str

    def __repr__(self) -> str:
        return f"RunningStore({self.url})"


def store_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where this user's files are."""
    base = environment.get(_DIRECTORY_VARIABLE)
    return Path(base, "warmstate-stores") if base else Path("/tmp", f"warmstate-stores-{os.getuid()}")


def announce(store: RunningStore, directory: Path | None = None) -> Path:
    """Leaves this process's file. Raises `OSError` when others could read it, or the directory is not ours."""
    directory = directory or store_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory)
    path = directory / f"{os.getpid()}.json"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump({"url": store.url, "password": store.password}, file)
    return path


def find_running_stores(directory: Path | None = None) -> list[RunningStore]:
    """The stores whose process lives; files of the dead are removed."""
    directory = directory or store_directory()
    try:
        _check_private(directory)
    except OSError:
        return []
    found: list[RunningStore] = []
    for path in sorted(directory.glob("*.json")):
        if not path.stem.isdigit() or not psutil.pid_exists(int(path.stem)):
            path.unlink(missing_ok=True)
            continue
        try:
            found.append(RunningStore(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            # It is being written or taken away at this moment.
            continue
    return found


def _check_private(directory: Path) -> None:
    """/tmp is everybody's: somebody else may have made a directory of this name before us."""
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} is not this user's alone")
