"""Who may be continued in a dead trainer's place: decided without I/O, performed until it is proven."""

from collections.abc import Callable

import pytest
from attrs import evolve

from adapters.frontends.release import Case, Finding, Verdict, look, release
from lifecycle import Outcome, PauseMode, events
from lifecycle.events import Request
from lifecycle.fleet import EngineFacts
from lifecycle.history import Remembered
from lifecycle.ledger import Debt
from lifecycle.ports import Acknowledgement, EngineReport
from lifecycle.testing import Answer, LoseReply, Refuse, ScriptedEngine

CERTAIN = Debt(engine="E1", mode=PauseMode.ABORT, epoch=1, certain=True)
UNCERTAIN = evolve(CERTAIN, certain=False)
OWED = Remembered(incarnation="1", label="run:3", debt=CERTAIN)
PAUSED = EngineReport(kind="scripted", incarnation="1", paused=True, label="run:3")
RUNS = evolve(PAUSED, paused=False)
DIRTY = evolve(OWED, dirty=True)


@pytest.mark.parametrize(
    ("known", "report", "verdict", "reason"),
    [
        (OWED, PAUSED, Verdict.OWED, "paused, and its weights are whole"),
        (OWED, evolve(PAUSED, label="run:2"), Verdict.OWED, "paused"),
        (OWED, evolve(PAUSED, label="other/model:v1.5"), Verdict.OWED, "paused"),
        (evolve(OWED, label="before:7"), evolve(PAUSED, label="before:7"), Verdict.OWED, "paused"),
        (evolve(OWED, debt=UNCERTAIN), PAUSED, Verdict.OWED, "paused, and its weights are whole"),
        (evolve(OWED, debt=UNCERTAIN), RUNS, Verdict.OWED, "a pause of it may still land, and its weights are whole"),
        (OWED, evolve(PAUSED, paused=None), Verdict.OWED, "a pause of it may still land"),
        (OWED, RUNS, Verdict.FINE, "somebody has continued it"),
        (evolve(OWED, debt=None), RUNS, Verdict.FINE, ""),
        (evolve(OWED, debt=None, unfit="caches"), RUNS, Verdict.FINE, "caches"),
        (OWED, evolve(RUNS, incarnation="2"), Verdict.FINE, "another process than the journal's"),
        (DIRTY, evolve(RUNS, incarnation="2"), Verdict.FINE, "another process than the journal's"),
        (None, RUNS, Verdict.FINE, ""),
        (None, PAUSED, Verdict.LEFT, "paused, and nothing proves that its weights are whole"),
        (evolve(OWED, debt=None), PAUSED, Verdict.LEFT, "paused, and not by the journal's trainer"),
        (OWED, evolve(PAUSED, incarnation="2"), Verdict.LEFT, "paused, and it is another process than the journal's"),
        (
            OWED,
            evolve(PAUSED, incarnation=None),
            Verdict.LEFT,
            "paused, and it does not tell whether it is",
        ),
        (evolve(OWED, incarnation=None), PAUSED, Verdict.LEFT, "paused, and it does not tell whether it is the"),
        (OWED, evolve(PAUSED, label="other:9"), Verdict.LEFT, "paused, and it is labelled other:9: another trainer"),
        (
            evolve(OWED, debt=UNCERTAIN),
            evolve(RUNS, label="other:9"),
            Verdict.LEFT,
            "a pause of it may still land, and",
        ),
        (DIRTY, PAUSED, Verdict.LEFT, "its weights may be partly written; a publication cures it"),
        (DIRTY, evolve(PAUSED, incarnation=None), Verdict.LEFT, "its weights may be partly written"),
        (DIRTY, RUNS, Verdict.LEFT, "it runs, but its weights may be partly written"),
        (OWED, evolve(PAUSED, whole=False), Verdict.LEFT, "an update is open in it or was left half-way"),
        (OWED, evolve(PAUSED, asleep=True), Verdict.LEFT, "asleep: whoever put it to sleep has to wake it"),
    ],
)
def test_an_engine_is_judged(known: Remembered | None, report: EngineReport, verdict: Verdict, reason: str) -> None:
    """A continue is due where a journal proves, of this very process, that its pause is ours and its weights whole."""
    ruling = Case(known=known, run="run").judge(report)
    assert (ruling.verdict, ruling.reason[: len(reason)]) == (verdict, reason)
    assert ruling.continues is (verdict is Verdict.OWED or (verdict is Verdict.FINE and "continued" in reason))
    assert bool(ruling.reason) is bool(reason)


@pytest.mark.parametrize(
    ("known", "report", "verdict"),
    [
        (None, PAUSED, Verdict.OWED),
        (evolve(OWED, debt=None), PAUSED, Verdict.OWED),
        (OWED, evolve(PAUSED, incarnation="2"), Verdict.OWED),
        (DIRTY, evolve(PAUSED, incarnation="2"), Verdict.OWED),
        (DIRTY, PAUSED, Verdict.LEFT),
        (DIRTY, evolve(PAUSED, incarnation=None), Verdict.LEFT),
        (None, evolve(PAUSED, whole=False), Verdict.LEFT),
        (None, evolve(PAUSED, asleep=True), Verdict.LEFT),
    ],
)
def test_a_word_is_worth_less_than_a_proof(known: Remembered | None, report: EngineReport, verdict: Verdict) -> None:
    """Somebody's word stands in for a proof that is missing, and never against one."""
    assert Case(known=known, run="run", trust_paused=True).judge(report).verdict is verdict


# ----------------------------------------------------------------------------------------------------------- performing


class Patient(ScriptedEngine):
    """An engine to which something happens after each continue."""

    after: Callable[["Patient"], object] = staticmethod(lambda _: None)

    async def perform(
        self, request: Request, facts: EngineFacts, *, timeout: float, sent: Callable[[], None] = lambda: None
    ) -> Acknowledgement:
        answer = await super().perform(request, facts, timeout=timeout, sent=sent)
        if isinstance(request, events.ContinueGeneration):
            self.after(self)
        return answer

    @property
    def continues(self) -> int:
        """How often it was continued."""
        return self.kinds.count("ContinueGeneration")


def left_paused() -> Patient:
    """Return an engine that a dead trainer has paused."""
    engine = Patient("E1", label="run:3")
    engine.paused = PauseMode.ABORT
    return engine


async def released(engine: Patient, known: Remembered, *, changed: bool = False, trusted: bool = False) -> Finding:
    """Look at an engine, and release it."""
    case = Case(known=known, run="run", trust_paused=trusted)
    finding = await look(engine, case, patience=1)
    return await release(engine, case, finding, changed=lambda: changed, patience=1)


@pytest.mark.anyio
@pytest.mark.parametrize("debt", [CERTAIN, UNCERTAIN])
async def test_a_paused_engine_is_continued_and_asked(debt: Debt) -> None:
    """One continue, and then a probe that says it runs."""
    engine = left_paused()
    finding = await released(engine, evolve(OWED, debt=debt))
    assert finding.ruling.verdict is Verdict.RELEASED
    assert (finding.report is not None and finding.report.paused, engine.paused) == (False, None)
    assert engine.kinds == ["ProbeEngine", "ContinueGeneration", "ProbeEngine"]


@pytest.mark.anyio
@pytest.mark.parametrize("debt", [CERTAIN, UNCERTAIN])
async def test_an_engine_in_debt_that_runs_is_continued_too(debt: Debt) -> None:
    """A pause may land late: the continue that is owed is sent."""
    engine = Patient("E1", label="run:3")
    assert (await released(engine, evolve(OWED, debt=debt))).ruling.verdict is Verdict.RELEASED
    assert engine.continues == 1


@pytest.mark.anyio
async def test_a_pause_that_lands_after_the_continue_is_continued() -> None:
    """An acknowledgement is no proof: as long as a probe says that it is paused, it is continued again."""
    engine = left_paused()

    def land(patient: Patient) -> None:
        patient.paused = PauseMode.ABORT if patient.continues == 1 else None

    engine.after = land
    assert (await released(engine, evolve(OWED, debt=UNCERTAIN))).ruling.verdict is Verdict.RELEASED
    assert engine.continues == 2


@pytest.mark.anyio
async def test_a_continue_without_an_answer_is_repeated() -> None:
    """A lost reply proves nothing, whether it took effect or not."""
    for applied in (True, False):
        engine = left_paused().on(events.ContinueGeneration, LoseReply(applied=applied))
        assert (await released(engine, OWED)).ruling.verdict is Verdict.RELEASED
        assert engine.continues == 2


@pytest.mark.anyio
async def test_an_engine_that_does_not_continue_is_left() -> None:
    """A refusal is told at once; acknowledgements after which it stays paused are believed three times."""
    refusing = left_paused().on(events.ContinueGeneration, Refuse("not today"))
    ruling = (await released(refusing, OWED)).ruling
    assert (ruling.verdict, ruling.reason) == (Verdict.LEFT, "did not continue: not today")
    stubborn = left_paused().on(events.ContinueGeneration, *[Answer(Acknowledgement(outcome=Outcome.DONE))] * 9)
    ruling = (await released(stubborn, OWED)).ruling
    assert (ruling.verdict, ruling.reason) == (Verdict.LEFT, "does not say that it runs after 3 continues")
    assert (refusing.continues, stubborn.continues) == (1, 3)


@pytest.mark.anyio
async def test_nothing_is_continued_once_the_journal_has_changed() -> None:
    """Whoever writes to it takes care of the engines."""
    engine = left_paused()
    ruling = (await released(engine, OWED, changed=True)).ruling
    assert ruling.verdict is Verdict.STOOD_DOWN
    assert ruling.reason.startswith("the journal was written meanwhile")
    assert (engine.continues, engine.paused) == (0, PauseMode.ABORT)


@pytest.mark.anyio
async def test_a_dirty_engine_is_never_continued() -> None:
    """Neither where the journal says so, nor where the engine does, whatever somebody's word is."""
    told, half_written = left_paused(), left_paused()
    half_written.whole = False
    assert (await released(told, DIRTY, trusted=True)).ruling.verdict is Verdict.LEFT
    assert (await released(half_written, OWED, trusted=True)).ruling.verdict is Verdict.LEFT
    assert (told.continues, half_written.continues, half_written.violations) == (0, 0, [])


@pytest.mark.anyio
async def test_what_else_is_wrong_with_a_released_engine_is_told() -> None:
    """Its weights are whole, but the trainer would not have let it serve."""
    ruling = (await released(left_paused(), evolve(OWED, unfit="it may serve caches of old weights"))).ruling
    assert (ruling.verdict, ruling.reason) == (Verdict.RELEASED, "it may serve caches of old weights")


@pytest.mark.anyio
async def test_an_engine_is_judged_anew_before_each_continue() -> None:
    """Another process that comes up paused in between is not the one that was to be released."""
    engine = left_paused()

    def restart(patient: Patient) -> None:
        patient.restart(label="run:3")
        patient.paused = PauseMode.ABORT

    engine.after = restart
    ruling = (await released(engine, OWED)).ruling
    assert (ruling.verdict, engine.continues) == (Verdict.LEFT, 1)
    assert "another process than the journal's" in ruling.reason


@pytest.mark.anyio
async def test_an_engine_that_does_not_answer_is_unreachable() -> None:
    """It is told with what is known of it, and nothing is sent to it."""
    engine = left_paused()
    engine.crash()
    finding = await released(engine, OWED)
    assert (finding.ruling.verdict, finding.ruling.reason) == (Verdict.UNREACHABLE, "connection refused")
    assert (finding.report, engine.continues) == (None, 0)
