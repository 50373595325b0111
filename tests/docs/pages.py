"""Runs the Python of a page as a reader would: block after block, in one namespace."""

import contextlib
import io
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """Return the text of a page."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


_run = anyio.run
_LONGEST = 60.0
"""Seconds after which a block that hangs has failed."""


def _run_bounded(function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    async def bounded() -> Any:
        with anyio.fail_after(_LONGEST):
            return await function(*args)

    return _run(bounded)


def told_and_printed(text: str) -> list[tuple[str, str]]:
    """Run every Python block. Returns for each what the `text` block after it says it prints, and what it printed."""
    names: dict[str, Any] = {}
    pairs = []
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, flags=re.MULTILINE | re.DOTALL)
    for number, (code, told) in enumerate(blocks, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), patch.object(anyio, "run", _run_bounded):
            exec(compile(code, f"block {number}", "exec"), names)  # noqa: S102 - our own page
        pairs.append((told, printed.getvalue()))
    return pairs
