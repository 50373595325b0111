"""What holds for the package as a whole: what it imports, what it offers, and how it is written."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lifecycle

PACKAGE = Path(lifecycle.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = ("adapters", "httpx", "torch")
PUBLIC = [
    *("State", "Trigger", "TRANSITIONS", "Transition", "LifecycleMachine"),
    *("Lifecycle", "Deadlines", "FleetPolicy", "PauseMode", "Outcome", "Standing"),
    *("StalenessBudget", "Ticket", "PauseLedger"),
    *("GenerationRequest", "Generation", "Segment"),
    *("events", "errors"),
]


def _imports(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_inside_imports_nothing_of_the_outside(path: Path) -> None:
    """No file of the core imports an adapter, an HTTP client or a tensor library, not even within a function."""
    assert _imports(ast.parse(path.read_text(encoding="utf-8"))) & set(OUTSIDE) == set()


def test_importing_the_inside_loads_nothing_of_the_outside() -> None:
    """A trainer that imports the core, its tests' helpers included, pays for none of the adapters' libraries."""
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in FILES
    ]
    program = f"import sys, {', '.join(modules)}\nprint(*(m for m in {OUTSIDE} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_where_users_look_for_it(name: str) -> None:
    """Names that users rely on are importable from `lifecycle`, and listed."""
    assert hasattr(lifecycle, name)
    assert name in lifecycle.__all__


def test_everything_listed_exists() -> None:
    """`from lifecycle import *` works."""
    assert [name for name in lifecycle.__all__ if not hasattr(lifecycle, name)] == []


def _public_coroutines(path: Path) -> dict[str, str]:
    """Return the docstrings of coroutines that users or adapters can call; what is nested in functions is nobody's."""
    found: dict[str, str] = {}

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                look(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("_"):
                found[f"{path.stem}.{prefix}{node.name}"] = ast.get_docstring(node) or ""

    look(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


COROUTINES = {name: doc for path in FILES for name, doc in _public_coroutines(path).items()}


@pytest.mark.parametrize("name", sorted(COROUTINES))
def test_a_public_coroutine_says_what_a_cancellation_leaves(name: str) -> None:
    """Whoever may be cancelled in it can read what is left then."""
    lines = COROUTINES[name].splitlines()
    assert [line for line in lines if line.startswith("Cancellation: ") and len(line) > len("Cancellation: ")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_grows_beyond_reading(path: Path) -> None:
    """A file of more than 500 lines has two subjects."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500
