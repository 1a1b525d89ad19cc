"""The table of reported failures points at tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROWS = [line for line in (TESTS / "reported_failures.md").read_text().splitlines() if re.match(r"\|.*#\d|\| CVE", line)]


def test_every_report_is_answered() -> None:
    assert len(ROWS) > 30
    assert [row for row in ROWS if "::test_" not in row and "does not apply: " not in row] == []


@pytest.mark.parametrize("name", sorted({name for row in ROWS for name in re.findall(r"`(\S+::test_\w+)`", row)}))
def test_the_test_that_answers_exists(name: str) -> None:
    file, function = name.split("::")
    tree = ast.parse((TESTS / file).read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert function in defined
