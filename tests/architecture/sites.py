"""Places in the source, found by syntax: what a rule looks at, and what its exceptions name."""

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from attrs import frozen

import adapters
import lifecycle

_PACKAGES = (lifecycle, adapters)
ROOT = Path(str(lifecycle.__file__)).parent.parent
FILES = tuple(sorted(path for package in _PACKAGES for path in Path(str(package.__file__)).parent.rglob("*.py")))

Finder = Callable[[ast.AST], bool]


@frozen
class Site:
    """One place that a rule is about."""

    where: str
    """`path::Class.function`, which survives edits that line numbers do not."""
    line: int

    def __str__(self) -> str:
        return f"{self.where} (line {self.line})"


def sites(found: Finder, files: Iterable[Path] = FILES) -> list[Site]:
    """Return where in the library `found` holds."""
    return [
        site
        for path in files
        for site in sites_in(path.read_text(encoding="utf-8"), found, path.relative_to(ROOT).as_posix())
    ]


def sites_in(source: str, found: Finder, path: str = "here.py") -> list[Site]:
    """Return where in `source` `found` holds."""
    return [
        Site(f"{path}::{name}" if name else path, node.lineno)
        for node, name in _nodes(source)
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler) and found(node)
    ]


@functools.cache
def _nodes(source: str) -> tuple[tuple[ast.AST, str], ...]:
    return tuple(_named(ast.parse(source)))


def _named(node: ast.AST, name: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Yield every node below `node` with the names of the classes and functions around it."""
    for child in ast.iter_child_nodes(node):
        yield child, name
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _named(child, f"{name}.{child.name}".lstrip("."))
        else:
            yield from _named(child, name)


def called(node: ast.AST) -> str:
    """Return what a call calls, such as `anyio.sleep`; empty for what is no call."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def unlisted(found: Iterable[Site], allowed: Mapping[str, str]) -> list[str]:
    """Return the sites that no exception names."""
    return [str(site) for site in found if site.where not in allowed]


def stale(found: Iterable[Site], allowed: Mapping[str, str]) -> list[str]:
    """Return the exceptions that no site needs any more, or that give no reason."""
    used = {site.where for site in found}
    return [where for where, reason in allowed.items() if where not in used or not reason]
