"""How commands end, and what several of them take."""

import sys
from enum import StrEnum
from importlib.metadata import packages_distributions
from typing import NoReturn

import typer

FINE, VIOLATION, UNREADABLE, INTERRUPTED = 0, 1, 2, 130


class Dialect(StrEnum):
    """The servers whose dialect is spoken."""

    SGLANG = "sglang"
    VLLM = "vllm"


def fail(code: int, message: str) -> NoReturn:
    """End the command with one sentence on the standard error."""
    sys.stderr.write(f"{message}\n")
    raise typer.Exit(code)


def clashing() -> list[str]:
    """Return the other projects that install a top-level `adapters`: either may shadow the other's modules."""
    return sorted(set(packages_distributions().get("adapters", [])) - {"rollout-lifecycle"})
