"""`python -m tests.chaos --seeds 50`: kill trainers at moments that seeds choose, and look what becomes of the engines.

Exit codes: 0 no clean engine stayed paused and every dirty one was refused, then cured; 1 otherwise.
"""

import argparse
import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import torch
from attrs import define

from adapters.engines import EmbeddedEngine
from adapters.frontends.demo.checkpoint import write_model

from .rescue import Rescue, call_doctor, complaints, cure, guarding, scene_of
from .seeds import Chance, chance
from .trainer import Life
from .victims import at_work, die

_ENGINES = 2


@define
class Tally:
    """What happened, over all seeds."""

    seeds: int = 0
    good: int = 0
    in_pause: int = 0
    in_update: int = 0
    demos: int = 0
    dirty: int = 0
    owed: int = 0
    clean: int = 0
    """Engines that were neither."""


def one(chosen: Chance, urls: tuple[str, ...], model: Path, out: Path, tally: Tally) -> list[str]:
    """Kill one trainer, and let the engines be rescued and cured. Returns what is wrong then."""
    out.mkdir()
    life = Life(
        run=f"chaos-{chosen.seed}",
        urls=urls,
        dialect=chosen.dialect,
        transfer=chosen.transfer,
        pause_mode=chosen.pause_mode,
        model=model,
        out=out,
        dies=chosen.dies,
    )
    rescue = Rescue()
    with at_work(chosen, life) as victim:
        watch: AbstractContextManager[None] = guarding(life, victim.pid, rescue) if chosen.guarded else nullcontext()
        with watch:
            die(victim, chosen, life)
            scene = scene_of(life)
    if not chosen.guarded:
        call_doctor(life, rescue)
    tally.in_pause += scene.paused
    tally.in_update += scene.updating
    tally.demos += chosen.demo
    tally.dirty += len(scene.dirty)
    tally.owed += len(scene.owed)
    tally.clean += len(scene.engines) - len(scene.dirty) - len(scene.owed)
    wrong = anyio.run(complaints, life, scene, rescue)
    return wrong + anyio.run(cure, life)


def tell(chosen: Chance, wrong: list[str], seconds: float) -> None:
    """Say how a seed went, in a line, and what went wrong."""
    who = "demo" if chosen.demo else "trainer"
    how = f"{chosen.dialect}, {chosen.transfer}, {chosen.pause_mode.value}"
    rescuer = "guard" if chosen.guarded else "doctor"
    outcome = "ok" if not wrong else "WRONG"
    sys.stdout.write(
        f"seed {chosen.seed:3d}: {who} ({how}) at {chosen.moment}, {rescuer}: {outcome} ({seconds:.1f} s)\n"
    )
    sys.stdout.writelines(f"    {sentence}\n" for sentence in wrong)
    sys.stdout.flush()


def main() -> int:
    """Go through the seeds; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make chaos", description="Kill trainers, and look what becomes of engines.")
    parser.add_argument("--seeds", type=int, default=50, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tally, began = Tally(), time.monotonic()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="chaos-")))
        write_model(directory / "model", seed=7)
        urls = {
            dialect: tuple(
                stack.enter_context(EmbeddedEngine(model=directory / "model", dialect=dialect)).url
                for _ in range(_ENGINES)
            )
            for dialect in ("sglang", "vllm")
        }
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            chosen, at = chance(seed), time.monotonic()
            wrong = one(chosen, urls[chosen.dialect], directory / "model", directory / str(seed), tally)
            tell(chosen, wrong, time.monotonic() - at)
            tally.seeds += 1
            tally.good += not wrong
    sys.stdout.write(
        f"{tally.good} of {tally.seeds} in {time.monotonic() - began:.0f} s; killed in a pause {tally.in_pause}, "
        f"in an update {tally.in_update}, the demo {tally.demos}; engines dirty {tally.dirty}, "
        f"clean and owed a continue {tally.owed}, clean and owed nothing {tally.clean}\n"
    )
    return int(tally.good != tally.seeds)


if __name__ == "__main__":
    sys.exit(main())
