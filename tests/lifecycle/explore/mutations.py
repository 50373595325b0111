"""Bugs made on purpose, each a patch of the real code: the explorer has to find every one."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve, field, frozen

from lifecycle import bookkeeping, driver, events, shielding
from lifecycle.bookkeeping import Bookkeeper
from lifecycle.driver import Driver
from lifecycle.gate import SubmissionGate
from lifecycle.ledger import PauseLedger
from lifecycle.procedures.attaching import Attaching
from lifecycle.procedures.pausing import Pausing
from lifecycle.procedures.publishing import Publishing
from lifecycle.states import Outcome

Patch = pytest.MonkeyPatch


def skip_compensation(patch: Patch) -> None:
    """What did not commit is left as it is."""

    async def nothing(driver: Driver, _: Any) -> None:
        await driver._fault_if_too_few()

    patch.setattr(Driver, "_make_good", nothing)


def continue_a_dirty_engine(patch: Patch) -> None:
    """Every engine in debt is continued, whatever its weights are."""
    sending = Bookkeeper.sending

    def careless(books: Bookkeeper, request: events.Request) -> None:
        if not isinstance(request, events.ContinueGeneration):
            sending(books, request)

    async def everybody(pausing: Pausing, _: Any) -> None:
        owing = [debt.engine for debt in pausing._context.cohort.ledger.outstanding]
        await pausing._context.effects.fan_out(events.ContinueGeneration, owing)

    patch.setattr(Bookkeeper, "sending", careless)
    patch.setattr(Pausing, "_continue", everybody)


def take_unknown_for_not_done(patch: Patch) -> None:
    """A pause whose reply is lost counts as one that did not happen."""
    paused = Bookkeeper._paused

    def trusting(books: Bookkeeper, request: Any, ack: Any, facts: Any) -> None:
        known = evolve(ack, outcome=Outcome.NOT_DONE) if ack.outcome is Outcome.UNKNOWN else ack
        paused(books, request, known, facts)

    patch.setattr(Bookkeeper, "_paused", trusting)


def drop_the_proof(patch: Patch) -> None:
    """An update begins on the strength of what is remembered."""

    async def nothing(_: Pausing, __: Any) -> None:
        """Do nothing."""

    patch.setattr(Pausing, "_prove", nothing)


def advance_the_version_early(patch: Patch) -> None:
    """The version advances before the engines have finished."""
    finish = Publishing._finish

    async def hasty(publishing: Publishing, operation: Any) -> None:
        context = publishing._context
        context.cohort.version = publishing._publication.target
        context.recorder.emit(events.VersionAdvanced, previous=1)
        await finish(publishing, operation)

    patch.setattr(Publishing, "_finish", hasty)


def forget_the_debt_of_a_fenced_engine(patch: Patch) -> None:
    """An engine that is fenced owes nothing any more."""
    fence = Bookkeeper.fence

    def forgetful(books: Bookkeeper, name: str, standing: Any, reason: str) -> None:
        fence(books, name, standing, reason)
        books._cohort.ledger.forget(name)

    patch.setattr(Bookkeeper, "fence", forgetful)


def serve_without_a_canary(patch: Patch) -> None:
    """An engine is routed to as soon as it was continued."""

    async def trusting(publishing: Publishing, operation: Any) -> None:
        for name in publishing._context.reachable_of(operation.published):
            publishing._context.books.serve(name)

    patch.setattr(Publishing, "_canary", trusting)


def commit_without_verifying(patch: Patch) -> None:
    """What an engine says it has finished counts as verified."""

    async def trusting(publishing: Publishing, _: Any) -> None:
        publishing._publication.verified |= publishing._publication.finished

    patch.setattr(Publishing, "_verify", trusting)


def swallow_a_cancellation(patch: Patch) -> None:
    """What is carried to its end forgets who was cancelled meanwhile."""

    async def forgetful(step: Callable[[], Any]) -> None:
        await shielding.to_the_end(step)

    patch.setattr(driver, "to_the_end", forgetful)


def settle_an_uncertain_pause_by_a_continue(patch: Patch) -> None:
    """An acknowledged continue settles every debt, without a probe."""
    patch.setattr(PauseLedger, "continued", PauseLedger.forget)


def count_weights_as_whole_after_begin(patch: Patch) -> None:
    """Weights are at risk only from the first transfer, in every server."""
    sending = Bookkeeper.sending

    def trusting(books: Bookkeeper, request: events.Request) -> None:
        if isinstance(request, events.BeginUpdate):
            books._cohort.fleet.update(str(request.engine), session=True, touched=False)
        else:
            sending(books, request)

    patch.setattr(Bookkeeper, "sending", trusting)


def go_on_with_too_few(patch: Patch) -> None:
    """Whatever is lost, the lifecycle does not fault."""

    async def nothing(_: Driver) -> None:
        """Do nothing."""

    patch.setattr(Driver, "_fault_if_too_few", nothing)


def take_a_new_process_for_the_old_one(patch: Patch) -> None:
    """Nobody looks whether a server was started anew."""
    patch.setattr(bookkeeping, "incarnation_changed", lambda _facts, _report: False)


def leave_the_gate_open(patch: Patch) -> None:
    """Whoever comes to the gate is let through."""
    patch.setattr(SubmissionGate, "_has_room", lambda _gate, _size: True)


def never_ask_the_lost_again(patch: Patch) -> None:
    """An engine that was lost stays so: recovering asks the others only."""
    probe = Attaching._probe

    async def short(attaching: Attaching, operation: Any) -> None:
        attaching_first = operation.attempt.source.name == "CLOSED"
        if attaching_first or attaching._context.reachable:
            await probe(attaching, operation)

    patch.setattr(Attaching, "_probe", short)


@frozen(kw_only=True)
class Mutation:
    """A bug, and where it shows."""

    bug: Callable[[Patch], None]
    predicate: str
    """Which is the first not to hold."""
    faults: int
    """The fewest with which it shows."""
    steps: int
    """The fewest, with so many faults."""
    options: dict[str, Any] = field(factory=dict)

    def __str__(self) -> str:
        return self.bug.__name__


MUTATIONS = (
    Mutation(bug=skip_compensation, predicate="nothing_is_left_in_between", faults=1, steps=2),
    Mutation(bug=continue_a_dirty_engine, predicate="no_dirty_engine_is_continued", faults=0, steps=5),
    Mutation(bug=take_unknown_for_not_done, predicate="every_pause_is_on_record", faults=1, steps=2),
    Mutation(bug=drop_the_proof, predicate="no_weights_meet_generation", faults=1, steps=4),
    Mutation(bug=advance_the_version_early, predicate="the_version_advances_with_the_engines", faults=0, steps=5),
    Mutation(bug=forget_the_debt_of_a_fenced_engine, predicate="every_pause_is_on_record", faults=0, steps=4),
    Mutation(bug=serve_without_a_canary, predicate="a_canary_comes_before_serving", faults=0, steps=5),
    Mutation(bug=commit_without_verifying, predicate="the_version_advances_with_the_engines", faults=1, steps=5),
    Mutation(bug=swallow_a_cancellation, predicate="who_is_cancelled_is_told", faults=1, steps=3),
    Mutation(
        bug=settle_an_uncertain_pause_by_a_continue,
        predicate="no_continue_settles_what_may_still_land",
        faults=1,
        steps=2,
    ),
    Mutation(
        bug=count_weights_as_whole_after_begin,
        predicate="no_dirty_engine_serves",
        faults=0,
        steps=3,
        options={"at_risk_from_begin": True},
    ),
    Mutation(bug=go_on_with_too_few, predicate="too_few_means_faulted", faults=1, steps=2),
    Mutation(
        bug=take_a_new_process_for_the_old_one, predicate="who_serves_holds_the_published_version", faults=1, steps=7
    ),
    Mutation(bug=leave_the_gate_open, predicate="only_running_admits", faults=0, steps=1),
    Mutation(bug=never_ask_the_lost_again, predicate="running_can_be_reached", faults=1, steps=2),
)
