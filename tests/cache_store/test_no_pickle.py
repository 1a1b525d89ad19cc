"""Nothing that comes from a store or a client is ever unpickled: no module of ours knows how."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def calls_torch_load(path: Path) -> bool:
    """`torch.load` unpickles as well."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute))
    return any(node.attr == "load" and getattr(node.value, "id", None) == "torch" for node in nodes)


def test_no_module_of_ours_unpickles() -> None:
    folders = ("cache_store", "cluster", "kernels", "models", "replicas")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 50
    found = [path for path in modules if imported_modules(path) & FORBIDDEN or calls_torch_load(path)]
    assert found == []
