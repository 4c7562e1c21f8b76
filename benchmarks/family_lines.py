"""Lines of code that each pipeline family costs: its row in the table, and every private name that the row uses.

python benchmarks/family_lines.py
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from onetake.policies import families


def lines_per_family() -> dict[str, int]:
    """Pipeline class → lines; what several rows share counts for each of them, comments count too."""
    source = inspect.getsource(families)
    tree = ast.parse(source)
    private = {name: node for node in tree.body for name in defined(node) if name.startswith("_")}
    table = next(node.value for node in tree.body if isinstance(node, ast.AnnAssign) and "FAMILIES" in defined(node))
    assert isinstance(table, ast.Dict)
    found = {}
    for key, row in zip(table.keys, table.values, strict=True):
        assert isinstance(key, ast.Constant)
        used = closure(row, private)
        nodes = [row, *(private[name] for name in used)]
        found[key.value] = sum(node.end_lineno - node.lineno + 1 for node in nodes)
    return found


def defined(node: ast.stmt) -> list[str]:
    """Names that a top-level statement binds."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def closure(node: ast.AST, private: dict[str, ast.stmt]) -> set[str]:
    """Private names that `node` uses, and those that they use."""

    def walk(node: ast.AST) -> Iterator[str]:
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and name.id in private:
                yield name.id
                if private[name.id] is not node:
                    yield from walk(private[name.id])

    return set(walk(node))


if __name__ == "__main__":
    for name, lines in sorted(lines_per_family().items(), key=lambda item: -item[1]):
        print(f"{lines:3d}  {name}")
