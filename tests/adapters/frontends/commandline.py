"""The command line as a person starts it: a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-m", "adapters")


def run(*arguments: str | Path, python_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. `python_path`: a directory whose packages are installed as well."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"} | ({"PYTHONPATH": str(python_path)} if python_path else {}),
    )


def run_without(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command where `module` is not installed."""
    return run_python(
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['rollout-lifecycle', *sys.argv[1:]]\n"
        "from adapters.frontends.cli import main; sys.exit(main())",
        *arguments,
    )


def run_python(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a few lines of Python in a process of their own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
