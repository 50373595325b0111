"""Hypothesis strategies for the core's values, built from the types that the classes declare."""

import types
import typing
from enum import Enum
from typing import Any

import attrs
from hypothesis import settings
from hypothesis import strategies as st

from lifecycle.cohort import Cohort, FleetPolicy, Intent, Publication
from lifecycle.events import Event, all_events
from lifecycle.fleet import Fleet, label_of
from lifecycle.ports import Acknowledgement, Channel, EngineReport
from lifecycle.staleness import StalenessBudget
from lifecycle.states import Outcome, PauseMode, Standing

QUICK = settings(deadline=None, max_examples=60)
"""For properties over single values. Nothing here is a matter of time."""

NAMES = ("left", "right")

words = st.text(max_size=12)
versions = st.none() | st.integers(0, 9)
labels = st.none() | st.sampled_from(["run:3", "run:7", "other:7", "/models/seven", ""])


def of_type(declared: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for what a field of an event may hold."""
    if isinstance(declared, types.UnionType):
        return st.one_of([of_type(option) for option in typing.get_args(declared)])
    if typing.get_origin(declared) is tuple:
        return st.lists(of_type(typing.get_args(declared)[0]), max_size=3).map(tuple)
    if isinstance(declared, type) and issubclass(declared, Enum):
        return st.sampled_from(declared)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-(2**40), 2**40),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: words,
        type(None): st.none(),
    }
    return plain[declared]


def instances_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    """Return a strategy for events of one class; fields that the journal leaves out keep their defaults."""
    hints = typing.get_type_hints(kind)
    journalled = [f.name for f in attrs.fields(kind) if f.metadata.get("journal", True)]
    return st.builds(kind, **{name: of_type(hints[name]) for name in journalled})


any_event = st.sampled_from(sorted(all_events())).flatmap(lambda name: instances_of(all_events()[name]))

budgets = st.builds(
    StalenessBudget,
    batch_size=st.integers(1, 8),
    max_staleness=st.integers(0, 3),
    max_concurrent=st.none() | st.integers(1, 12),
)

reports = st.builds(
    EngineReport,
    kind=st.just("scripted"),
    incarnation=st.sampled_from([None, "1", "2"]),
    paused=st.sampled_from([None, True, False]),
    asleep=st.booleans(),
    whole=st.sampled_from([None, True, False]),
    label=labels,
)

acknowledgements = st.builds(
    Acknowledgement,
    outcome=st.sampled_from(Outcome),
    detail=words,
    stopped=st.sampled_from([None, True, False]),
    idle=st.sampled_from([None, True, False]),
    untouched=st.booleans(),
    unreachable=st.booleans(),
    report=st.none() | reports,
)

policies = st.builds(
    FleetPolicy, min_engines=st.none() | st.integers(1, 2), on_engine_failure=st.sampled_from(["fence", "fault"])
)

intents = st.builds(Intent, mode=st.none() | st.sampled_from(PauseMode), target=versions, resume=st.booleans())


@st.composite
def publications(draw: st.DrawFn) -> Publication:
    """Draw an update at some point of its way."""
    sent = draw(st.integers(0, 3))
    target = draw(st.integers(0, 9))
    return Publication(
        target=target,
        label=label_of("run", target),
        channel=Channel(kind="broadcast", name="group-1"),
        members=NAMES,
        opened=draw(st.sets(st.sampled_from(NAMES))),
        sent=sent,
        acknowledged=draw(st.integers(0, sent)),
        complete=draw(st.booleans()),
    )


@st.composite
def cohorts(draw: st.DrawFn) -> Cohort:
    """Draw a cohort about which anything may be known, whether or not a lifecycle would ever get there."""
    fleet = Fleet(NAMES[: draw(st.integers(0, 2))])
    cohort = Cohort(
        fleet=fleet,
        policy=draw(policies),
        budget=draw(budgets),
        version=draw(versions),
        submission_open=draw(st.booleans()),
        generation_held=draw(st.booleans()),
        mode=draw(st.sampled_from(PauseMode)),
        publication=draw(st.none() | publications()) if len(fleet) == len(NAMES) else None,
    )
    for name in fleet:
        fleet.update(
            name,
            standing=draw(st.sampled_from(Standing)),
            version=draw(versions),
            dirty=draw(st.booleans()),
            paused=draw(st.sampled_from([None, True, False])),
            idle=draw(st.booleans()),
            asleep=draw(st.booleans()),
            session=draw(st.booleans()),
        )
        if draw(st.booleans()):
            cohort.ledger.owe(name, mode=cohort.mode, epoch=0, certain=draw(st.booleans()))
    return cohort
