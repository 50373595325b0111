"""Groups: one ticket for all members, and one result with what they bring."""

from typing import Any

import pytest

from lifecycle import Episode, RolloutStatus, events

from .rollouts_rig import Script, bring, settled, staged

pytestmark = pytest.mark.anyio


class Members(Script):
    """A script whose runs are told apart by their member."""

    async def __call__(self, episode: Episode, data: Any) -> Any:
        return await super().__call__(episode, (data, episode.member))


async def test_a_group_is_admitted_and_settled_as_a_unit() -> None:
    """One ticket of the group's size; the values come in the members' order, however they end."""
    members = Members()
    async with staged(group_size=3, batch_size=3, max_staleness=0) as stage:
        stage.executor.submit(members, "a")
        stage.executor.submit(members, "b")
        await settled()
        assert members.waiting == [("a", 0), ("a", 1), ("a", 2)]
        assert (len({run.ticket for run in members.runs}), stage.executor.running, stage.executor.queued) == (1, 1, 1)
        members.succeed(("a", 2), ("a", 0))
        await settled()
        assert (stage.counts, stage.executor.finished) == ((3, 0, 0), 0)
        members.succeed(("a", 1))
        [result] = await stage.executor.wait(1)
        assert result.values == (("a", 0), ("a", 1), ("a", 2))
        assert (stage.counts, [event.group_size for event in stage.of(events.RolloutAdmitted)]) == ((0, 3, 0), [3])


@pytest.mark.parametrize(
    ("min_members", "lost", "status"),
    [
        (None, 1, RolloutStatus.ACCEPTED),
        (None, 2, RolloutStatus.ACCEPTED),
        (None, 3, RolloutStatus.FAILED),
        (1, 3, RolloutStatus.ACCEPTED),
        (1, 4, RolloutStatus.FAILED),
        (4, 1, RolloutStatus.FAILED),
    ],
)
async def test_a_group_that_lost_members_is_accepted_with_enough(
    min_members: int | None, lost: int, status: RolloutStatus
) -> None:
    """By default with two, since one alone can be compared with nothing; the lost ones count as rejected."""
    members = Members()
    async with staged(group_size=4, min_members=min_members) as stage:
        number = stage.executor.submit(members, "a")
        await settled()
        for member in range(4):
            if member < lost:
                members.of(("a", member)).fail(ValueError(member))
            else:
                members.succeed(("a", member))
            await settled()
        result = await stage.executor.wait_for(number)
        assert (result.status, [str(error) for error in result.errors]) == (status, [str(i) for i in range(lost)])
        assert [member for _, member in result.values] == list(range(lost, 4))
        accepted = 4 - lost if status is RolloutStatus.ACCEPTED else 0
        assert stage.counts == (0, accepted, 4 - accepted)
        assert [event.members for event in stage.of(events.RolloutSettled)] == [accepted]


async def test_a_group_whose_members_return_none_is_rejected() -> None:
    """Nothing has failed: there was nothing to train on."""
    members = Members()
    async with staged(group_size=2) as stage:
        number = stage.executor.submit(members, "a")
        await settled()
        members.of(("a", 0)).succeed(None)
        members.of(("a", 1)).succeed(None)
        assert (await stage.executor.wait_for(number)).status is RolloutStatus.REJECTED
        assert stage.counts == (0, 0, 2)


async def test_a_member_that_takes_too_long_is_lost_and_the_others_are_not() -> None:
    """The group ends with those that were in time."""
    members = Members()
    async with staged(group_size=3, timeout=4.0) as stage:
        stage.executor.submit(members, "a")
        await settled()
        members.succeed(("a", 0), ("a", 2))
        [result] = await stage.executor.wait(1)
        assert ([member for _, member in result.values], [type(error) for error in result.errors]) == (
            [0, 2], [TimeoutError],
        )  # fmt: skip
        assert stage.counts == (0, 2, 1)


async def test_submissions_may_choose_their_group_size() -> None:
    """A big group waits for room for all of it, and smaller ones behind it do not starve it."""
    members = Members()
    async with staged(batch_size=2, max_staleness=1) as stage:
        stage.executor.submit(members, "small", group_size=2)
        stage.executor.submit(members, "big", group_size=4)
        stage.executor.submit(members, "one")
        await settled()
        assert members.waiting == [("small", 0), ("small", 1)]
        members.of(("small", 0)).fail()
        members.of(("small", 1)).fail()
        await settled()
        assert members.waiting == [("big", number) for number in range(4)]


async def test_the_groups_filter_judges_all_its_values() -> None:
    """It is given the tuple of what is left of the group, in order."""
    judged: list[Any] = []

    def accept(values: Any) -> bool:
        judged.append(values)
        return len(set(values)) > 1

    async def workflow(episode: Episode, data: Any) -> Any:
        return data * episode.member

    async with staged(group_size=3, accept=accept, batch_size=6) as stage:
        numbers = [stage.executor.submit(workflow, data) for data in (0, 1)]
        results = [await stage.executor.wait_for(number) for number in numbers]
        assert bring(results) == [(0, RolloutStatus.REJECTED), (1, RolloutStatus.ACCEPTED)]
        assert sorted(judged) == [(0, 0, 0), (0, 1, 2)]
        assert stage.counts == (0, 3, 3)


async def test_a_failed_group_is_repeated_as_a_whole() -> None:
    """With a new ticket, all members run again."""
    members = Members()
    async with staged(group_size=2, retries=1) as stage:
        stage.executor.submit(members, "a")
        await settled()
        members.of(("a", 0)).fail()
        members.succeed(("a", 1))
        await settled()
        assert members.waiting == [("a", 0), ("a", 1)]
        members.succeed(("a", 0), ("a", 1))
        [result] = await stage.executor.wait(1)
        assert (len(result.values), result.errors, stage.counts) == (2, (), (0, 2, 2))
