"""Tables of worked examples: what the budget says, and what came of the small run."""

from typing import Any

from lifecycle import OnStale, StalenessBudget

from .picture import num
from .timeline import BATCH_SIZE, MAX_CONCURRENT, MAX_STALENESS, Bar, Timeline, instants, simulate

REFERENCE: tuple[tuple[Any, ...], ...] = (
    (100, 4, 2, 0, 0, 0),
    (1000, 4, 2, 5, 0, 0),
    (20, 8, 3, 0, 0, 15),
    (64, 16, 1, 7, 20, 120),
    (8, 4, 0, 3, 2, 13),
    (3, 2, 1, 0, 10, 0),
)
"""max_concurrent, batch_size, max_staleness, version, running, accepted."""


def capacities() -> str:
    """Return reference values of the formula."""
    names = ("max_concurrent", "batch_size", "max_staleness", "version", "running", "accepted")
    rows = [
        [*map(str, row), str(StalenessBudget(**dict(zip(names, row, strict=True))).capacity())] for row in REFERENCE
    ]
    return _table([*names, "capacity"], rows)


def rollouts(run: Timeline) -> str:
    """Return what became of each rollout."""
    rows = [
        [str(b.number), f"{num(b.admitted)} s, {b.version}", _at(b.finished, "still runs"), _end(b), _age(b)]
        for b in run.bars.values()
    ]
    return _table(["rollout", "admitted, version", "finished", "then", "versions old"], rows)


def moments(run: Timeline) -> str:
    """Return the formula, worked at the instants that the picture marks."""
    rows = []
    for letter, (at, why) in zip("abcd", instants(run), strict=True):
        free, left = MAX_CONCURRENT - at.running, at.allowed - at.counted - at.running
        worked = (
            f"`min({MAX_CONCURRENT} - {at.running}, ({MAX_STALENESS} + {at.version} + 1) * {BATCH_SIZE} - "
            f"({at.counted} + {at.running})) = min({free}, {left})`"
        )
        rows.append([letter, f"{num(at.at)} s", worked, str(at.capacity), why])
    return _table(["", "at", "capacity()", "is", "since"], rows)


def policies() -> str:
    """Return what becomes of the rollout that grows too old, and of the steps, under each policy."""
    number = next(bar.number for bar in simulate().bars.values() if bar.dropped)
    rows = []
    for policy in OnStale:
        run = simulate(policy)
        bar = run.bars[number]
        begun = ", ".join(num(begin) for begin, _ in run.steps)
        rows.append([f"`{policy.name}`", _fate(bar, policy), f"{begun} s"])
    return _table(["policy", f"rollout {number}", "training steps begin at"], rows)


def _fate(bar: Bar, policy: OnStale) -> str:
    if bar.dropped:
        return f"dropped at {_at(bar.left)}, {bar.staleness} versions old"
    plural = "" if bar.staleness == 1 else "s"
    fate = f"taken at {_at(bar.left)}, {bar.staleness} version{plural} old"
    if policy is OnStale.MASK:
        return f"{fate}; {bar.usable} of its {len(bar.tokens)} tokens are used"
    return fate


def _at(seconds: float | None, otherwise: str = "") -> str:
    return otherwise if seconds is None else f"{num(seconds)} s"


def _end(bar: Bar) -> str:
    if bar.left is None:
        return "" if bar.finished is None else "waits"
    return f"{'dropped' if bar.dropped else 'taken'} at {_at(bar.left)}, version {bar.taken_at}"


def _age(bar: Bar) -> str:
    return "" if bar.staleness is None else str(bar.staleness)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
