"""Figures: measured in rounds that take turns, so that a busy moment of the machine hits all of them alike."""

import gc
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field


@define
class Figure:
    """One thing that was measured, once a round."""

    name: str
    unit: str
    at_most: float | None = None
    """The target, where less is better."""
    at_least: float | None = None
    """The target, where more is better."""
    more_is_better: bool = False
    samples: list[float] = field(factory=list)

    @property
    def median(self) -> float:
        """The middle of all rounds."""
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        """The round that was disturbed least."""
        return (max if self.more_is_better or self.at_least is not None else min)(self.samples)

    @property
    def met(self) -> bool:
        """Whether the target is met. By the best round: what makes the others slower is other people's work."""
        if self.at_most is not None:
            return self.best <= self.at_most
        return self.at_least is None or self.best >= self.at_least

    @property
    def target(self) -> str:
        """The target in words; empty where there is none."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return "" if self.at_least is None else f"≥ {self.at_least:g}"

    def as_json(self) -> dict[str, Any]:
        """Return it for a program to read."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "best": self.best,
            "samples": self.samples,
            "at_most": self.at_most,
            "at_least": self.at_least,
            "met": self.met,
        }


Contest = Mapping[str, Callable[[], Mapping[str, float]]]
"""Contestants, by any name. Each returns what it measured, by names that stand for figures."""


def rounds(contest: Contest, figures: Mapping[str, Figure], count: int, tell: Callable[[str], None]) -> None:
    """Let the contestants take turns `count` times, and give every figure its samples."""
    for number in range(count):
        for name, measure in contest.items():
            tell(f"round {number + 1} of {count}: {name}")
            gc.collect()
            for key, value in measure().items():
                figures[key].samples.append(value)


def ratio(name: str, numerator: Figure, denominator: Figure, *, target: float | None = None) -> Figure:
    """Return the ratio of two figures, by their medians: they were measured in turns. `target`: the least it may be."""
    return Figure(name, "times", at_least=target, more_is_better=True, samples=[numerator.median / denominator.median])
