"""A hook of mkdocs: ``::: module`` or ``::: module: Name, Name`` in a page becomes signatures and docstrings.

Read from the sources, not imported: the rooms are links without an ``__init__.py``, which mkdocstrings does not follow,
and a page should build without torch.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

SOURCES = Path(__file__).parents[1] / "src"
WANTED = re.compile(r"^::: (?P<module>[\w.]+)(?:: (?P<names>[\w, ]+))?$", re.MULTILINE)
ROLE = re.compile(r":(?:class|func|mod|data|meth):`~?\.?([^`]+)`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its references filled in."""
    return WANTED.sub(lambda match: _module(match["module"], match["names"]), markdown)


def _module(module: str, names: str | None) -> str:
    path = SOURCES.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        raise PluginError(f"api: there is no module {module}")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    }
    wanted = [name.strip() for name in names.split(",")] if names else list(found)
    if missing := [name for name in wanted if name not in found]:
        raise PluginError(f"api: {module} has no {', '.join(missing)}")
    parts = [f"### `{module}`", _text(ast.get_docstring(tree))]
    for name in wanted:
        parts += _entry(found[name], "")
    return "\n\n".join(part for part in parts if part)


def _entry(node: ast.ClassDef | ast.FunctionDef, owner: str) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        shown = f"{owner}{node.name}({ast.unparse(node.args)}){returns}"
        return [f"```python\n{shown}\n```", _text(ast.get_docstring(node))]
    bases = ", ".join(map(ast.unparse, node.bases))
    fields = [f"    {ast.unparse(line)}" for line in node.body if isinstance(line, ast.AnnAssign) and _public(line)]
    parts = [f"```python\nclass {node.name}{f'({bases})' if bases else ''}\n" + "\n".join(fields) + "\n```"]
    parts.append(_text(ast.get_docstring(node)))
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            parts += _entry(method, f"{node.name}.")
    return parts


def _public(line: ast.AnnAssign) -> bool:
    return isinstance(line.target, ast.Name) and not line.target.id.startswith("_")


def _text(docstring: str | None) -> str:
    """A docstring as Markdown: roles become code, its sections lists."""
    lines = []
    for line in ROLE.sub(r"`\1`", docstring or "").replace("``", "`").splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, colon, rest = line.strip().partition(": ")
            lines.append(
                f"- `{name}`: {rest}" if colon and name.replace(", ", "").isidentifier() else f"- {line.strip()}"
            )
        elif re.fullmatch(r"(Args|Attributes|Raises|Returns|Class attributes):", line):
            lines += [f"*{line[:-1]}*", ""]
        else:
            lines.append(line)
    return "\n".join(lines)
