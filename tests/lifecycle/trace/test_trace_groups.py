"""Groups, policies for what is stale, and where staleness is counted from: genuine traces, and forged ones."""

from functools import cache
from typing import Any

import pytest
from attrs import evolve

from lifecycle import Lifecycle, MeasuredFrom, OnStale, StalenessBudget, events
from lifecycle.events import Event
from lifecycle.testing import ScriptedEngine, ScriptedTransfer

from .forging import accusations, index_of, show, verdict_of
from .recordings import DEADLINES, SOURCE, Sink, on_virtual_time

STALENESS = 1


@cache
def groups(on_stale: OnStale = OnStale.DROP, measured_from: MeasuredFrom = MeasuredFrom.ADMISSION) -> tuple[Event, ...]:
    """Return the trace of groups that lose members, are consumed, dropped and evaluated, over two publications."""

    async def play() -> None:
        budget = StalenessBudget(
            batch_size=4, max_staleness=STALENESS, on_stale=on_stale, measured_from=measured_from, max_concurrent=9
        )
        async with Lifecycle(
            [ScriptedEngine("E1")], transfer=ScriptedTransfer(), budget=budget, name="run", deadlines=DEADLINES,
            journal=sink,
        ) as lifecycle:  # fmt: skip
            whole, partly, lost, rejected = [await _ticket(lifecycle, size) for size in (3, 3, 1, 1)]
            whole.accept()
            partly.accept(2)
            lost.accept()
            rejected.reject()
            lifecycle.consume([whole])
            await lifecycle.publish(SOURCE, version=1)
            late = await _ticket(lifecycle, 4)
            async with lifecycle.admit(evaluation=True, group_size=2) as evaluation:
                evaluation.accept()
            lifecycle.consume([partly])
            lifecycle.discard([lost])
            await lifecycle.publish(SOURCE, version=2)
            old = await _ticket(lifecycle, 1)
            old.saw((2, 3))
            old.accept()
            late.saw((2,))
            late.accept(3)
            await lifecycle.publish(SOURCE, version=3)
            await lifecycle.publish(SOURCE, version=4)
            if measured_from is MeasuredFrom.OLDEST_TOKEN or on_stale in {OnStale.KEEP, OnStale.MASK}:
                late.oldest_token_version = 3
                lifecycle.consume([late])
            else:
                lifecycle.discard([late])

    async def _ticket(lifecycle: Lifecycle, size: int) -> Any:
        return await lifecycle.admit(group_size=size).__aenter__()

    sink = Sink()
    on_virtual_time(play, "asyncio")
    return tuple(sink.events)


def changed(event: Event, **fields: Any) -> Event:
    """Return the event with other values."""
    return evolve(event, **fields)


POLICIES = [(policy, measured) for policy in OnStale for measured in MeasuredFrom]


@pytest.mark.parametrize(("on_stale", "measured_from"), POLICIES)
def test_a_genuine_trace_of_groups_is_sound_under_every_policy(on_stale: OnStale, measured_from: MeasuredFrom) -> None:
    """No rule accuses a lifecycle of what its budget allows."""
    trace = groups(on_stale, measured_from)
    assert verdict_of(trace).violations == [], show(trace)
    opened = trace[index_of(trace, events.LifecycleOpened)]
    assert isinstance(opened, events.LifecycleOpened)
    assert (opened.on_stale, opened.measured_from) == (on_stale, measured_from)
    assert (opened.batch_size, opened.max_staleness, opened.max_concurrent, opened.accepted) == (4, STALENESS, 9, 0)


def test_the_facts_of_a_group_tell_its_size_and_what_is_left_of_it() -> None:
    """Admission tells the size, settlement the members; staleness by token is told where it counts."""
    trace = groups()
    admitted = [event for event in trace if isinstance(event, events.RolloutAdmitted)]
    settled = [event for event in trace if isinstance(event, events.RolloutSettled)]
    assert [event.group_size for event in admitted] == [3, 3, 1, 1, 4, 2, 1]
    assert [(event.ticket, event.members, event.accepted) for event in settled] == [
        (1, 3, True), (2, 2, True), (3, 1, True), (4, 0, False), (-1, 2, True), (6, 1, True), (5, 3, True),
    ]  # fmt: skip
    assert {event.by_token for event in trace if isinstance(event, events.RolloutConsumed)} == {None}
    by_token = groups(measured_from=MeasuredFrom.OLDEST_TOKEN)
    consumed = [event for event in by_token if isinstance(event, events.RolloutConsumed)]
    assert [(event.ticket, event.staleness, event.by_token) for event in consumed] == [(1, 0, 0), (2, 1, 1), (5, 3, 1)]


FORGERIES: dict[str, tuple[type[Event], dict[str, Any], dict[str, Any], str]] = {
    "a group larger than the capacity": (
        events.RolloutAdmitted, {"ticket": 2}, {"group_size": 6}, "staleness-capacity",
    ),
    "a group larger than what lost members have freed": (
        events.RolloutAdmitted,
        {"ticket": 6},
        {"group_size": 5},
        "staleness-capacity",
    ),
    "a group that leaves no room for the next": (
        events.RolloutAdmitted, {"ticket": 1}, {"group_size": 5}, "staleness-capacity",
    ),
    "more members than the group has": (events.RolloutSettled, {"ticket": 2}, {"members": 4}, "ticket-once"),
    "an accepted group without a member": (events.RolloutSettled, {"ticket": 2}, {"members": 0}, "ticket-once"),
    "a rejected group with members": (events.RolloutSettled, {"ticket": 4}, {"members": 1}, "ticket-once"),
    "a tighter bound than was kept": (events.LifecycleOpened, {}, {"max_staleness": 0}, "staleness"),
    "smaller batches than were consumed": (events.LifecycleOpened, {}, {"batch_size": 3}, "staleness-capacity"),
    "fewer places than were taken": (events.LifecycleOpened, {}, {"max_concurrent": 7}, "staleness-capacity"),
    "a run that had accepted rollouts already": (events.LifecycleOpened, {}, {"accepted": 1}, "staleness-capacity"),
    "another age": (events.RolloutConsumed, {"ticket": 2}, {"staleness": 0}, "staleness"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_field_is_accused(name: str) -> None:
    """By the rule that it breaks."""
    kind, wanted, forged, rule = FORGERIES[name]
    trace = list(groups())
    index = index_of(tuple(trace), kind, **wanted)
    trace[index] = changed(trace[index], **forged)
    accused = accusations(trace)
    assert rule in {broken for _, broken in accused}, show(trace)
    if name.startswith("a group larger"):
        assert (index + 1, rule) in accused


@pytest.mark.parametrize("on_stale", OnStale)
def test_only_a_policy_that_takes_what_is_stale_may_consume_it(on_stale: OnStale) -> None:
    """KEEP and MASK take it; DROP and WAIT never do."""
    trace = list(groups(OnStale.KEEP))
    index = index_of(tuple(trace), events.LifecycleOpened)
    trace[index] = changed(trace[index], on_stale=on_stale)
    consumed = index_of(tuple(trace), events.RolloutConsumed, ticket=5)
    accused = [] if on_stale in {OnStale.KEEP, OnStale.MASK} else [(consumed + 1, "staleness")]
    assert accusations(trace) == accused


def test_staleness_by_token_excuses_only_where_it_is_counted_so() -> None:
    """Counted from admission the same rollout is too old; so it is where its tokens are."""
    genuine = groups(measured_from=MeasuredFrom.OLDEST_TOKEN)
    consumed = index_of(genuine, events.RolloutConsumed, ticket=5)
    trace = list(genuine)
    trace[consumed] = changed(trace[consumed], by_token=STALENESS + 1)
    assert accusations(trace) == [(consumed + 1, "staleness")]
    trace = list(genuine)
    opened = index_of(genuine, events.LifecycleOpened)
    trace[opened] = changed(trace[opened], measured_from=MeasuredFrom.ADMISSION)
    assert accusations(trace) == [(consumed + 1, "staleness")]


def test_members_free_what_they_held_and_no_more() -> None:
    """A group consumed with two of three frees two: a third would be more than there was."""
    trace = list(groups())
    index = index_of(tuple(trace), events.RolloutSettled, ticket=1)
    # One member fewer is accepted, so that the version frees one fewer, and one more is rejected: the same capacity.
    trace[index] = changed(trace[index], members=2)
    assert verdict_of(trace).violations == []
    # A journal from before groups says nothing of members: one, where it was accepted.
    index = index_of(tuple(trace), events.RolloutSettled, ticket=3)
    trace[index] = changed(trace[index], members=None)
    assert verdict_of(trace).violations == []
