"""The budget against a model that keeps every rollout by itself."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lifecycle import StalenessBudget, Ticket
from lifecycle.errors import NoCapacity


class BudgetModel(RuleBasedStateMachine):
    """A trainer that admits, settles, trains on as many rollouts as it likes, and says how many they were."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = StalenessBudget(batch_size=1, max_staleness=0)
        self.running: list[Ticket] = []
        self.buffer: list[Ticket] = []
        self.rejected = 0
        self.consumed = 0

    @initialize(batch=st.integers(1, 4), staleness=st.integers(0, 3), most=st.none() | st.integers(1, 6))
    def begin(self, batch: int, staleness: int, most: int | None) -> None:
        """Choose the sizes."""
        self.budget = StalenessBudget(batch_size=batch, max_staleness=staleness, max_concurrent=most)

    @rule()
    def admit(self) -> None:
        """Admit exactly where the capacity says so."""
        if self.budget.capacity() >= 1:
            self.running.append(self.budget.admit())
        else:
            with pytest.raises(NoCapacity):
                self.budget.admit()

    @precondition(lambda self: self.running)
    @rule(accept=st.booleans(), which=st.integers(0, 99))
    def settle(self, accept: bool, which: int) -> None:
        """Return any of the running rollouts, in any order."""
        ticket = self.running.pop(which % len(self.running))
        if accept:
            ticket.accept()
            self.buffer.append(ticket)
        else:
            ticket.reject()
            self.rejected += 1

    @rule(share=st.floats(0, 1), step=st.integers(0, 2))
    def advance(self, share: float, step: int) -> None:
        """Publish, having taken part of the buffer: dynamic batches, filtered groups, dropped rollouts."""
        taken = round(share * len(self.buffer))
        del self.buffer[:taken]
        self.consumed += taken
        self.budget.advance(self.budget.version + step, consumed=taken)

    @invariant()
    def every_rollout_is_accounted_for(self) -> None:
        """Submitted = running + accepted + rejected, and each is what the trainer counts."""
        budget = self.budget
        accepted = len(self.buffer) + self.consumed
        assert (budget.running, budget.accepted, budget.rejected) == (len(self.running), accepted, self.rejected)
        assert budget.counted == len(self.buffer) + budget.version * budget.batch_size
        assert budget.submitted == len(self.running) + accepted + self.rejected

    @invariant()
    def nothing_drifts(self) -> None:
        """Capacity is the bound less what is admitted and not consumed, after any number of versions."""
        bound = (self.budget.max_staleness + 1) * self.budget.batch_size
        unconsumed = len(self.running) + len(self.buffer)
        assert unconsumed <= bound
        most = self.budget.max_concurrent
        free = bound - unconsumed
        assert self.budget.capacity() == (free if most is None else min(free, most - len(self.running)))


TestBudgetAgainstItsModel = BudgetModel.TestCase
TestBudgetAgainstItsModel.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)
