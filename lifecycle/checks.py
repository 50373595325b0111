"""Checks of what users give, before anything is done with it."""

from typing import Any


def whole(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return `value`. Raises `ValueError` unless it is an int, and no bool, from `minimum` to `maximum`."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    if not fits or (maximum is not None and value > maximum):
        range_ = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"{name} must be an int {range_}, got {value!r}")
    return int(value)
