"""The budget against a model that keeps every rollout by itself."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lifecycle import StalenessBudget, Ticket
from lifecycle.errors import NoCapacity, TicketSettled


def examples(default: int = 80) -> int:
    """Return how many examples a property is tried on: `LIFECYCLE_EXAMPLES`, where it is set."""
    return int(os.environ.get("LIFECYCLE_EXAMPLES", default))


class BudgetModel(RuleBasedStateMachine):
    """A trainer that admits groups, settles them in any order, trains on as many as it likes, and says how many."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = StalenessBudget(batch_size=1, max_staleness=0)
        self.told = True
        self.running: list[Ticket] = []
        self.settled: list[Ticket] = []
        self.buffer = 0
        self.taken_now = 0
        """Rollouts that training took since the last version: their capacity is free with the next."""
        self.accepted = 0
        self.rejected = 0

    @initialize(
        batch=st.integers(1, 6), staleness=st.integers(0, 3), most=st.none() | st.integers(1, 9), told=st.booleans()
    )
    def begin(self, batch: int, staleness: int, most: int | None, told: bool) -> None:
        """Choose the sizes, and whether `consume()` or `advance()` is told the numbers."""
        self.budget = StalenessBudget(batch_size=batch, max_staleness=staleness, max_concurrent=most)
        self.told = told
        if told:
            self.budget.consume(0)

    @rule(size=st.integers(1, 7), held=st.booleans())
    def admit(self, size: int, held: bool) -> None:
        """Admit exactly where the capacity says so. Whether it is held changes nothing for the budget."""
        if self.budget.capacity() >= size:
            ticket = self.budget.admit(size)
            if held:
                ticket.hold()
            self.running.append(ticket)
        else:
            with pytest.raises(NoCapacity):
                self.budget.admit(size)

    @precondition(lambda self: self.running)
    @rule(share=st.integers(0, 7), which=st.integers(0, 99))
    def settle(self, share: int, which: int) -> None:
        """Return any of the running groups, in any order, with as many of its members as there are."""
        ticket = self.running.pop(which % len(self.running))
        members = min(share, ticket.group_size)
        if members:
            ticket.accept(members)
        else:
            ticket.reject()
        self.settled.append(ticket)
        self.buffer += members
        self.accepted += members
        self.rejected += ticket.group_size - members

    @precondition(lambda self: self.settled)
    @rule(accept=st.booleans(), which=st.integers(0, 99))
    def settle_again(self, accept: bool, which: int) -> None:
        """The same again changes nothing, the contrary is refused, and the first verdict stays."""
        ticket = self.settled[which % len(self.settled)]
        before = ticket.accepted, ticket.members
        if ticket.accepted is accept:
            self.budget.settle(ticket, accept)
        else:
            with pytest.raises(TicketSettled):
                self.budget.settle(ticket, accept)
        assert (ticket.accepted, ticket.members) == before

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def settle_a_foreign_one(self, which: int) -> None:
        """Another budget's ticket of the same number is refused and changes nothing."""
        ours = self.running[which % len(self.running)]
        foreign = Ticket(ours.id, ours.version)
        with pytest.raises(ValueError, match="is not out"):
            self.budget.settle(foreign, True)
        with pytest.raises(ValueError, match="is not out"):
            self.budget.returned(foreign)
        assert not foreign.settled

    @rule(share=st.floats(0, 1))
    def consume(self, share: float) -> None:
        """Take part of the buffer: dynamic batches."""
        taken = round(share * self.buffer)
        self.buffer -= taken
        self.taken_now += taken
        if self.told:
            self.budget.consume(taken)

    @rule(share=st.floats(0, 1))
    def discard(self, share: float) -> None:
        """Drop part of the buffer: filtered groups, stale rollouts."""
        dropped = round(share * self.buffer)
        self.buffer -= dropped
        self.budget.discard(dropped)

    @rule(step=st.integers(0, 2))
    def advance(self, step: int) -> None:
        """Publish."""
        self.budget.advance(self.budget.version + step, consumed=None if self.told else self.taken_now)
        self.taken_now = 0

    @invariant()
    def every_rollout_is_accounted_for(self) -> None:
        """Submitted = running + accepted + rejected, and each is what the trainer counts."""
        budget = self.budget
        running = sum(ticket.group_size for ticket in self.running)
        assert (budget.running, budget.accepted, budget.rejected) == (running, self.accepted, self.rejected)
        assert list(budget.unsettled) == sorted(self.running, key=lambda ticket: ticket.id)
        assert budget.counted == self.buffer + self.taken_now + budget.version * budget.batch_size
        assert budget.submitted == running + self.accepted + self.rejected

    @invariant()
    def nothing_drifts(self) -> None:
        """Capacity is the bound less what is admitted and not consumed, after any number of versions."""
        bound = (self.budget.max_staleness + 1) * self.budget.batch_size
        unconsumed = self.budget.running + self.buffer + self.taken_now
        assert unconsumed <= bound
        most = self.budget.max_concurrent
        free = bound - unconsumed
        assert self.budget.capacity() == (free if most is None else min(free, most - self.budget.running))


TestBudgetAgainstItsModel = BudgetModel.TestCase
TestBudgetAgainstItsModel.settings = settings(deadline=None, max_examples=examples(), stateful_step_count=30)


@given(version=st.integers(0, 10**6), batch=st.integers(1, 4096), staleness=st.integers(0, 16))
@settings(deadline=None, max_examples=examples())
def test_a_restored_run_has_the_capacity_of_the_start(version: int, batch: int, staleness: int) -> None:
    """At any version, whatever was counted before."""
    fresh = StalenessBudget(batch_size=batch, max_staleness=staleness)
    budget = StalenessBudget(batch_size=batch, max_staleness=staleness, accepted=7)
    budget.advance(1, consumed=3)
    budget.restore(version)
    assert (budget.accepted, budget.capacity()) == (version * batch, fresh.capacity())
    assert budget.submitted == budget.accepted
