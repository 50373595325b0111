"""What a seed chooses: who is killed, when, and who looks after the engines then."""

import random

from attrs import frozen

from lifecycle import PauseMode

_LINES_OF_A_PAUSE = 60
"""About as many lines does a journal of two engines have between hold and release."""
_SECONDS = 1.2
_MODES = {
    "sglang": (PauseMode.ABORT, PauseMode.RETRACT),
    "vllm": (PauseMode.ABORT, PauseMode.KEEP, PauseMode.WAIT),
}


@frozen(kw_only=True)
class Chance:
    """One trainer's fate."""

    seed: int
    dialect: str
    transfer: str
    pause_mode: PauseMode
    demo: bool
    """It is the demo, and not only a trainer that publishes."""
    dies: tuple[int, int] | None
    """By its own hand: in which pause, and at which line of it. `None`: it is killed from outside."""
    seconds: float
    """When it is killed from outside, after its first pause."""

    @property
    def guarded(self) -> bool:
        """Whether a guard watches; otherwise the doctor is called."""
        return self.seed % 2 == 0

    @property
    def moment(self) -> str:
        """When it dies, in words."""
        if self.dies is None:
            return f"{self.seconds:.2f} s after a pause"
        pause, line = self.dies
        return f"line {line} of pause {pause}"


def chance(seed: int) -> Chance:
    """Return what `seed` chooses; the same for ever."""
    draw = random.Random(seed)
    dialect = ("sglang", "vllm")[seed // 2 % 2]
    demo = seed % 9 == 4
    by_line = not demo and draw.random() < 0.75
    return Chance(
        seed=seed,
        dialect=dialect,
        transfer=draw.choice(("broadcast", "broadcast", "disk")),
        pause_mode=draw.choice(_MODES[dialect]),
        demo=demo,
        dies=(draw.randint(1, 3), draw.randrange(_LINES_OF_A_PAUSE)) if by_line else None,
        seconds=draw.uniform(0, _SECONDS),
    )
