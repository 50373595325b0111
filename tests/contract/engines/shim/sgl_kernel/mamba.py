"""The part of the kernels that SGLang looks for here; see the package."""

from typing import Any

from . import __getattr__ as _missing


def __getattr__(name: str) -> Any:
    return _missing(name)
