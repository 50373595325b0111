"""A soak in small: see `tests.benchmarks.soak` for the large one."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.virtual_time import on_virtual_clock

from .soak import growth, sample, soak

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run on asyncio, whose own cancellation is part of it, and on a virtual clock."""
    return "asyncio", on_virtual_clock("asyncio")


@pytest.mark.parametrize("seed", [1, 2, 3, random.randrange(1 << 32)], ids=["1", "2", "3", "random"])
async def test_whatever_goes_wrong_the_books_balance_and_nothing_is_left(seed: int, tmp_path: Path) -> None:
    """After a run full of faults and cancellations every counter is zero, and the journal is sound."""
    run, _ = await soak(2_000, seed, journal=tmp_path / "journal.jsonl")

    assert (seed, run.complaints()) == (seed, [])


def test_a_leak_of_an_object_a_rollout_is_seen() -> None:
    """The soak reports memory that grows with the rollouts."""
    before = sample(0)
    leak = [[number] for number in range(40_000)]

    assert [complaint.split(" are")[0].split()[-1] for complaint in growth([before, sample(len(leak))])] == [
        "objects",
        "blocks",
    ]
