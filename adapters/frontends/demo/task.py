"""A verifiable task on a small vocabulary: repeat four symbols, then stop."""

import random
from collections.abc import Sequence

SYMBOLS = 16
LENGTH = 4
SEPARATOR = SYMBOLS
END = SYMBOLS + 1
VOCABULARY = 32
"""Rounded up: engines like sizes that divide evenly."""


def draw_prompt(random_numbers: random.Random) -> tuple[int, ...]:
    """Return a prompt: `LENGTH` symbols and the separator, token ids."""
    return (*(random_numbers.randrange(SYMBOLS) for _ in range(LENGTH)), SEPARATOR)


def reward(prompt: Sequence[int], output: Sequence[int]) -> float:
    """Return the share of right positions in `output`, 0 to 1: each symbol in its place, and the end after them."""
    wanted = (*prompt[:LENGTH], END)
    return sum(given == right for given, right in zip(output, wanted, strict=False)) / len(wanted)
