"""The repository as a package: modules import, layers point one way, the wheel holds every folder."""

import ast
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cache_store", "cluster", "kernels", "models", "replicas")
MAY_IMPORT = {
    "cache_store": set(),
    "kernels": set(),
    "models": {"kernels"},
    "replicas": {"models", "cache_store"},
    "cluster": {"replicas", "cache_store", "models", "kernels"},
}
# The command line reads checkpoints (preflight, demo) and benches kernels without a replica, so cluster sees both.


def _sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _module_name(path: Path) -> str:
    return ".".join(("warmstate", *path.relative_to(ROOT).with_suffix("").parts))


def _imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("path", _sources(), ids=_module_name)
def test_layers_point_one_way(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    used = {name.split(".")[1] for name in _imported_modules(path) if name.startswith("warmstate.")}
    assert used <= MAY_IMPORT[layer] | {layer}, f"{_module_name(path)} must not import {used - MAY_IMPORT[layer]}"


@pytest.mark.parametrize("path", _sources(), ids=_module_name)
def test_only_cluster_reads_the_environment(path: Path) -> None:
    source = path.read_text()
    if path.relative_to(ROOT).parts[0] != "cluster":
        assert "os.environ" not in source
        assert "getenv" not in source


def test_every_module_imports_in_a_fresh_interpreter() -> None:
    """NKI kernels import `nki`, for which the simulator stands in."""
    names = [_module_name(path) for path in _sources()]
    modules = [name for name in names if not name.endswith("_nki")]
    kernels = [name for name in names if name.endswith("_nki")]
    code = (
        f"import importlib\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        "from warmstate.kernels.nki_sim.install import real_or_simulated\nwith real_or_simulated():\n"
        f"    for name in {kernels!r}:\n        importlib.import_module(name)\nprint('imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=240)
    assert done.stdout.strip().endswith("imported"), done.stderr


def test_root_folders_are_namespace_packages() -> None:
    """A regular package named `kernels` on sys.path would be taken for Hugging Face's distribution of that name."""
    assert not [package for package in PACKAGES if (ROOT / package / "__init__.py").exists()]
    assert (ROOT / ".types" / "warmstate").is_symlink()


def test_blocks_have_one_size_on_both_sides_of_the_seam() -> None:
    keys = importlib.import_module("warmstate.cache_store.keys")
    backend = importlib.import_module("warmstate.models.backend")
    assert keys.BLOCK_TOKENS == backend.BLOCK_TOKENS
    assert keys.SEGMENT_TOKENS % keys.BLOCK_TOKENS == 0


def test_the_wheel_holds_every_folder_and_nothing_else(tmp_path: Path) -> None:
    """Built by way of the source distribution, beside the link that makes the folders a cycle."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    expected = {f"warmstate/{name}" for name in tracked if name.split("/")[0] in PACKAGES and not name.endswith(".md")}
    for name in (*expected, "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        target = tmp_path / "source" / name.removeprefix("warmstate/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name.removeprefix("warmstate/")).read_bytes())
    (tmp_path / "source" / ".types").mkdir()
    (tmp_path / "source" / ".types" / "warmstate").symlink_to("..")
    command = [sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(tmp_path / "source")]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected
