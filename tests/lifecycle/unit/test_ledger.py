"""The pause ledger: who owes a continue, and what settles it."""

import pytest

from lifecycle import PauseLedger, PauseMode
from lifecycle.ledger import Debt


def _owing(*, certain: bool = False) -> PauseLedger:
    ledger = PauseLedger()
    ledger.owe("left", mode=PauseMode.ABORT, epoch=1)
    if certain:
        ledger.confirm("left")
    return ledger


def _counts(ledger: PauseLedger) -> tuple[int, int, int]:
    return ledger.pauses, ledger.matched, len(ledger.outstanding)


def test_a_pause_that_goes_out_is_a_debt_at_once() -> None:
    """Before anything is known about a pause it counts as one that may have happened."""
    ledger = PauseLedger()
    debt = ledger.owe("left", mode=PauseMode.KEEP, epoch=4)
    assert debt == Debt(engine="left", mode=PauseMode.KEEP, epoch=4, certain=False, continued=False)
    assert ledger.owed("left") == debt
    assert (ledger.owed("right"), ledger.outstanding, _counts(ledger)) == (None, (debt,), (1, 0, 1))


def test_a_continue_settles_a_pause_that_was_acknowledged() -> None:
    """The ordinary way: paused for certain, continued for certain, even."""
    ledger = _owing(certain=True)
    assert ledger.continued("left") is True
    assert _counts(ledger) == (1, 1, 0)


def test_a_continue_alone_does_not_settle_an_uncertain_pause() -> None:
    """The pause may land after the continue: only a later probe that sees the engine run ends the debt."""
    ledger = _owing()
    assert (ledger.continued("left"), len(ledger.outstanding)) == (False, 1)
    assert (ledger.seen_running("left"), _counts(ledger)) == (True, (1, 1, 0))


def test_a_probe_alone_does_not_settle_an_uncertain_pause() -> None:
    """An engine that runs now may still receive the pause that was sent."""
    ledger = _owing()
    assert (ledger.seen_running("left"), len(ledger.outstanding)) == (False, 1)


def test_a_probe_settles_a_certain_pause_that_somebody_else_continued() -> None:
    """A pause that had happened and is over is over, whoever ended it."""
    assert _owing(certain=True).seen_running("left") is True


def test_an_acknowledgement_after_a_continue_makes_the_pause_the_later_one() -> None:
    """A pause confirmed after a continue stands until it is continued again."""
    ledger = _owing()
    ledger.continued("left")
    ledger.confirm("left")
    assert ledger.owed("left") == Debt(engine="left", mode=PauseMode.ABORT, epoch=1, certain=True)


def test_a_pause_that_did_not_happen_is_no_debt_and_never_was() -> None:
    """A refused pause leaves no trace in the counts, so that pauses and continues still match."""
    ledger = _owing()
    assert ledger.cancel("left") is True
    assert _counts(ledger) == (0, 0, 0)


def test_a_certain_debt_cannot_be_cancelled() -> None:
    """What an engine acknowledged is not undone by a later refusal."""
    ledger = _owing(certain=True)
    assert ledger.cancel("left") is False
    assert _counts(ledger) == (1, 0, 1)


@pytest.mark.parametrize("certain", [True, False])
def test_a_refused_repetition_does_not_cancel_the_pause_before_it(certain: bool) -> None:
    """The first pause may have landed although the second was refused: its debt stands."""
    ledger = _owing(certain=certain)
    ledger.owe("left", mode=PauseMode.ABORT, epoch=2)
    assert ledger.cancel("left") is False
    assert _counts(ledger) == (1, 0, 1)


def test_a_repeated_pause_is_one_debt_and_as_uncertain_as_the_last() -> None:
    """Servers do not count pauses: one continue undoes any number, but the last one may still be on its way."""
    ledger = _owing(certain=True)
    debt = ledger.owe("left", mode=PauseMode.WAIT, epoch=2)
    assert (debt.mode, debt.epoch, debt.certain, debt.continued) == (PauseMode.WAIT, 2, False, False)
    assert _counts(ledger) == (1, 0, 1)
    ledger.confirm("left")
    assert (ledger.continued("left"), _counts(ledger)) == (True, (1, 1, 0))


def test_a_new_server_process_owes_nothing() -> None:
    """The debt of a process that is no more is settled, once."""
    ledger = _owing(certain=True)
    assert (ledger.forget("left"), ledger.forget("left"), _counts(ledger)) == (True, False, (1, 1, 0))


def test_what_owes_nothing_settles_nothing() -> None:
    """Continues, probes and refusals without a debt are harmless."""
    ledger = PauseLedger()
    ledger.confirm("left")
    assert [ledger.continued("left"), ledger.seen_running("left"), ledger.cancel("left"), ledger.forget("left")] == [
        False
    ] * 4
    assert _counts(ledger) == (0, 0, 0)


def test_debts_are_listed_oldest_first() -> None:
    """The order in which engines came to owe is kept."""
    ledger = PauseLedger()
    for name in ("b", "a", "c"):
        ledger.owe(name, mode=PauseMode.ABORT, epoch=1)
    ledger.confirm("a")
    assert [debt.engine for debt in ledger.outstanding] == ["b", "a", "c"]
