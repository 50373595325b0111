"""`python -m tests.benchmarks.soak`: whether it lasts. Rollouts, publications and faults, for as long as is asked.

Afterwards every counter is zero and the books balance, every engine was treated as it may be, and memory has not grown
with the number of rollouts. On a virtual clock: no time limit is waited for, and none passes too early where the
machine is busy. Exit codes: 0 all that holds, 1 otherwise.
"""

import argparse
import gc
import logging
import random
import sys
import time
from pathlib import Path

import anyio
from attrs import define, field

from tests.virtual_time import on_virtual_clock

from .soaking import Soak

FLAT_RSS = 0.05
"""By how much of itself resident memory may grow between the first sample and the last."""
NOISE_RSS = 8 << 20
"""Bytes by which it may grow anyhow."""
FLAT_OBJECTS = 0.01
"""Objects that may be left for each rollout in between, and blocks of Python's allocator."""
NOISE = 20_000
"""Objects by which two samples may differ anyhow: a thousand results are remembered, and modules are imported late."""
SAMPLES = 5


@define
class Sample:
    """What the process holds while nothing runs."""

    rollouts: int
    rss: int
    """Bytes."""
    objects: int
    blocks: int
    seconds: float = field(factory=time.monotonic)


def sample(rollouts: int) -> Sample:
    """Look at this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return Sample(rollouts, pages * 4096, len(gc.get_objects()), sys.getallocatedblocks())


def growth(samples: list[Sample]) -> list[str]:
    """Return in what way memory has grown with the rollouts, in sentences."""
    first, last = samples[0], samples[-1]
    rollouts = max(1, last.rollouts - first.rollouts)
    allowed = NOISE + FLAT_OBJECTS * rollouts
    wrong = []
    if last.rss > first.rss + max(NOISE_RSS, FLAT_RSS * first.rss):
        wrong.append(f"resident memory grew from {first.rss >> 20} to {last.rss >> 20} MiB")
    for what, more in (("objects", last.objects - first.objects), ("blocks", last.blocks - first.blocks)):
        if more > allowed:
            wrong.append(f"{more} {what} are left of {rollouts} rollouts")
    return wrong


async def soak(rollouts: int, seed: int, *, journal: Path | None = None) -> tuple[Soak, list[Sample]]:
    """Run a soak of so many rollouts, with samples on the way.

    Cancellation: everything is closed.
    """
    run = Soak(random.Random(seed), journal=journal)
    samples: list[Sample] = []
    async with run:
        for part in range(1, SAMPLES + 1):
            await run.until(rollouts * part // SAMPLES)
            samples.append(sample(run.budget.submitted))
    return run, samples


def main() -> int:
    """Soak, report, and say by the exit code whether everything holds."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.soak", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=200_000, help="members of groups included (default: 200 000)")
    parser.add_argument("--seed", type=int, help="the dice (default: another one each time)")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="write a journal, and verify it in the end")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    logging.getLogger("lifecycle").setLevel(logging.CRITICAL)
    _say(f"seed {seed}")
    began = time.monotonic()
    run, samples = anyio.run(
        lambda: soak(options.rollouts, seed, journal=options.journal), backend_options=on_virtual_clock("asyncio")
    )
    for at in samples:
        _say(
            f"{at.rollouts:>9,} rollouts, {at.seconds - began:5.0f} s: {at.rss / 2**20:6.1f} MiB, "
            f"{at.objects:,} objects, {at.blocks:,} blocks"
        )
    _say(f"{run.tally}")
    wrong = [*run.complaints(), *growth(samples)]
    for complaint in wrong:
        _say(f"WRONG: {complaint}")
    _say("everything holds" if not wrong else f"{len(wrong)} things are wrong")
    return 1 if wrong else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
