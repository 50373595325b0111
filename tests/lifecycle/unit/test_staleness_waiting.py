"""`leaves_time`: a trainer that asks it before each batch never sees a rollout that is too old, and never stops."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import MeasuredFrom, OnStale, StalenessBudget, Ticket

from .test_staleness_model import examples


class Trainer:
    """Takes a batch a version, oldest first, only when there is time to leave the rest."""

    def __init__(self, batch: int, staleness: int, measured_from: MeasuredFrom = MeasuredFrom.ADMISSION) -> None:
        self.budget = StalenessBudget(
            batch_size=batch, max_staleness=staleness, on_stale=OnStale.WAIT, measured_from=measured_from
        )
        self.running: list[Ticket] = []
        self.buffer: list[Ticket] = []
        self.oldest_seen = 0

    def admit_all(self) -> None:
        """Fill the budget."""
        while self.budget.capacity() > 0:
            self.running.append(self.budget.admit())

    def end(self, which: int, accept: bool) -> None:
        """Let one of those that run end."""
        ticket = self.running.pop(which % len(self.running))
        if self.budget.measured_from is MeasuredFrom.OLDEST_TOKEN:
            ticket.saw((self.budget.version,))
        if accept:
            ticket.accept()
            self.buffer.append(ticket)
        else:
            ticket.reject()

    def train(self) -> bool:
        """Take a batch and publish, where that is possible."""
        size = self.budget.batch_size
        self.buffer.sort(key=lambda ticket: (-self.budget.staleness(ticket), ticket.id))
        if len(self.buffer) < size or not self.budget.leaves_time(self.buffer[size:]):
            return False
        taken, self.buffer = self.buffer[:size], self.buffer[size:]
        self.oldest_seen = max(self.oldest_seen, *map(self.budget.staleness, taken))
        self.budget.consume(size)
        self.budget.advance(self.budget.version + 1)
        return True


@given(
    batch=st.integers(1, 4),
    staleness=st.integers(0, 4),
    measured_from=st.sampled_from(MeasuredFrom),
    ends=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([True, True, True, False])), min_size=1, max_size=120),
)
@settings(deadline=None, max_examples=examples())
def test_a_trainer_that_waits_never_sees_what_is_too_old_and_never_stops(
    batch: int, staleness: int, measured_from: MeasuredFrom, ends: list[tuple[int, bool]]
) -> None:
    """Rollouts end in any order, some in vain; a batch is taken wherever there is time to leave the rest."""
    trainer = Trainer(batch, staleness, measured_from)
    order = deque(ends)
    trainer.admit_all()
    while order:
        which, accept = order.popleft()
        trainer.end(which, accept)
        while trainer.train():
            pass
        trainer.admit_all()
        assert trainer.oldest_seen <= staleness
        assert not any(trainer.budget.is_stale(ticket) for ticket in trainer.buffer)
    # From here on everything ends well: each version's batch is taken in the end.
    version = trainer.budget.version
    for _ in range(4 * trainer.budget.max_unconsumed):
        trainer.end(0, True)
        while trainer.train():
            pass
        trainer.admit_all()
    assert trainer.budget.version > version
    assert trainer.oldest_seen <= staleness


def test_waiting_is_in_vain_where_nothing_that_runs_could_change_it() -> None:
    """Too many old rollouts that have ended already: the batch is taken, and the rest is dropped later."""
    budget = StalenessBudget(batch_size=2, max_staleness=1, on_stale=OnStale.WAIT)
    tickets = [budget.admit() for _ in range(4)]
    for ticket in tickets:
        ticket.accept()
    budget.advance(1, consumed=0)
    assert all(ticket.accepted for ticket in tickets[2:])
    assert budget.leaves_time(tickets[2:])


def test_groups_count_with_all_that_may_come_of_them() -> None:
    """A group that runs may bring all its members; one that has ended brings those that are left."""
    budget = StalenessBudget(batch_size=2, max_staleness=1, on_stale=OnStale.WAIT)
    group, one = budget.admit(3), budget.admit()
    one.accept()
    assert not budget.leaves_time([])
    group.accept(2)
    assert budget.leaves_time([group])
    assert budget.leaves_time([group, one])
