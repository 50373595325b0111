"""Changing a trace as a forger would, and finding one's way in it."""

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from lifecycle import events
from lifecycle.events import Event
from lifecycle.trace import Verdict, verify


def renumbered(trace: list[Event]) -> list[Event]:
    """Give the events numbers without gaps and times in order, as a forger would; facts follow their requests."""
    numbers = {event.seq: number for number, event in reversed(list(enumerate(trace, 1)))}
    times = sorted(event.monotonic for event in trace)
    forged = []
    for number, (event, time) in enumerate(zip(trace, times, strict=True), 1):
        changes: dict[str, Any] = {"seq": number, "monotonic": time}
        if isinstance(event, events.EngineFact):
            changes["request"] = numbers.get(event.request, 0)
        forged.append(evolve(event, **changes))
    return forged


def without(trace: "tuple[Event, ...]", index: int) -> list[Event]:
    """Return the trace with one event missing, and no gap to show it."""
    return renumbered([*trace[:index], *trace[index + 1 :]])


def verdict_of(trace: "list[Event] | tuple[Event, ...]") -> Verdict:
    """Verify events as a journal that holds one a line."""
    return verify(enumerate(trace, 1))


def show(trace: "list[Event] | tuple[Event, ...]") -> str:
    """Return the trace for people, for the message of a test that fails."""
    hidden = {"seq", "at", "monotonic", "cohort", "channel", "bucket", "seconds"}
    lines = []
    for number, event in enumerate(trace, 1):
        names = [a.name for a in event.__attrs_attrs__ if a.name not in hidden]
        values = {name: getattr(event, name) for name in names}
        lines.append(
            f"{number:4d} {type(event).__name__} " + " ".join(f"{k}={getattr(v, 'name', v)}" for k, v in values.items())
        )
    return "\n".join(lines)


def moved(trace: tuple[Event, ...], index: int, distance: int) -> list[Event]:
    """Return the trace with one event moved, and numbers and times mended."""
    changed = list(trace)
    changed.insert(index + distance, changed.pop(index))
    return renumbered(changed)


def inserted(trace: tuple[Event, ...], index: int, added: Sequence[Event]) -> list[Event]:
    """Put events in before `index`, stamped like what stands there, with answers that belong to the request first."""
    stamped: list[Event] = []
    for event in added:
        before = trace[index - 1]
        number = 10_000 + len(stamped)
        changes: dict[str, Any] = {"seq": number, "epoch": before.epoch, "version": before.version}
        if isinstance(event, events.EngineFact):
            changes["request"] = 10_000
        stamped.append(evolve(event, **changes))
    return renumbered([*trace[:index], *stamped, *trace[index:]])


def index_of(trace: tuple[Event, ...], kind: type[Event], nth: int = 0, **wanted: Any) -> int:
    """Return where the `nth` event of a kind is that has these values."""
    found = [
        index
        for index, event in enumerate(trace)
        if isinstance(event, kind) and all(getattr(event, name) == value for name, value in wanted.items())
    ]
    return found[nth]


def accusations(trace: list[Event]) -> list[tuple[int, str]]:
    """Return line and rule of every violation."""
    return [(violation.line, violation.rule) for violation in verdict_of(trace).violations]


def index_of_after(trace: list[Event], index: int, kind: type[Event], wanted: dict[str, Any]) -> int:
    """Return where the first such event after `index` is."""
    return index + 1 + index_of(tuple(trace[index + 1 :]), kind, **wanted)
