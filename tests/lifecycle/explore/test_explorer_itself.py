"""The explorer is to be trusted: it forgets nothing that matters, and tries everything that it says it tries."""

import itertools
from typing import Any

import pytest
from attrs import fields
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import events as e
from lifecycle.cohort import Cohort, FleetPolicy, Publication
from lifecycle.driver import Driver
from lifecycle.explore import Truth, explore
from lifecycle.explore.__main__ import main
from lifecycle.explore.exploring import go_through
from lifecycle.explore.oracle import Oracle
from lifecycle.explore.outcomes import ALTERNATIVES
from lifecycle.explore.search import CLOSED, Search
from lifecycle.explore.stage import Stage
from lifecycle.explore.truth import act
from lifecycle.fleet import label_of
from lifecycle.states import PauseMode
from lifecycle.testing import ScriptedEngine
from lifecycle.values import Bucket

from .mutations import serve_without_a_canary


def _stage(engines: int = 1) -> Stage:
    return Stage(engines, policy=FleetPolicy(), mode=PauseMode.ABORT, buckets=2, at_risk=False)


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def test_whatever_can_decide_is_part_of_a_state() -> None:
    """Who adds a field to what the driver works with has to say whether states with different values are different."""
    stage = _stage()
    driver = stage.driver
    assert _names(Cohort) == {
        *("fleet", "run", "name", "policy", "ledger", "budget", "version", "epoch", "submission_open"),
        *("generation_held", "pause_seconds", "mode", "publication"),
    }
    assert _names(Publication) == {
        *("target", "label", "channel", "members", "dirtied", "opened", "sent", "acknowledged", "complete"),
        *("nbytes", "finished", "verified", "committed"),
    }
    assert set(vars(stage.cohort.fleet)) == {"_facts"}
    assert set(vars(stage.cohort.ledger)) == {"_debts", "pauses", "matched"}
    assert set(vars(stage.machine)) == {"cohort", "_model", "_graph", "_attempt"}
    assert set(vars(driver)) == {"_context", "_machine", "_procedures", "closing"}
    assert set(vars(stage.publisher)) == {
        *("_driver", "_machine", "_cohort", "_segments", "_transfer", "_target", "_wanted"),
    }
    owners: dict[str, set[str]] = {
        type(procedure.__self__).__name__: set(vars(procedure.__self__)) for procedure in _procedures(driver)
    }
    assert owners == {
        "Attaching": {"_context", "_pausing"},
        "Pausing": {"_context", "_held_since"},
        "Publishing": {"_context", "_moving", "_joined", "_cut"},
    }


def _procedures(driver: Driver) -> list[Any]:
    return list(driver._procedures.values())


def test_every_request_to_an_engine_has_its_outcomes() -> None:
    """No kind of request is left out."""
    kinds = {k for k in e.all_events().values() if issubclass(k, e.Request) and k.fact is not None}
    assert set(ALTERNATIVES) == kinds


def test_a_state_is_what_was_put_on_the_stage() -> None:
    """Putting any state on the stage and taking it from there changes nothing."""
    stage = _stage(engines=2)
    search = Search(stage, 1)
    search.start(stage.beginning((Truth(),) * 2))
    go_through(search)
    keys = [node.key for node in search.nodes if node.key != CLOSED]
    assert len(keys) > 100
    for key in keys:
        stage.load(key)
        assert stage.save()[0] == key


def test_what_is_known_from_another_run_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going through everything again instead of stopping where it is known brings no other state."""
    briefly = explore(engines=2, faults=1)
    monkeypatch.setattr(Search, "_is_known", lambda *_: False)
    assert explore(engines=2, faults=1).states == briefly.states


def test_engines_are_alike() -> None:
    """Which engine it is makes no other state: two that are found differently are one beginning, in either order."""
    stage = _stage(engines=2)
    odd, usual = Truth(paused=True), Truth()
    assert stage.beginning((odd, usual)) == stage.beginning((usual, odd))


@given(st.integers(0, 3), st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=4))
def test_the_oracle_gives_every_answer_once(faults: int, questions: list[list[int]]) -> None:
    """The runs are exactly the sequences of answers that the faults allow."""
    costs = [(0, *question) for question in questions]
    expected = {
        answers
        for answers in itertools.product(*(range(len(cost)) for cost in costs))
        if sum(cost[answer] for cost, answer in zip(costs, answers, strict=True)) <= faults
    }
    oracle, runs = Oracle(), []
    prefixes: list[tuple[int, ...]] = [()]
    while prefixes:
        oracle.begin(prefixes.pop(), faults)
        runs.append(tuple(oracle.choose(cost) for cost in costs))
        prefixes.extend(oracle.alternatives())
    assert sorted(runs) == sorted(expected)


_REQUESTS = st.sampled_from(
    [
        e.ProbeEngine(engine="engine"),
        e.PauseGeneration(engine="engine"),
        e.ProvePaused(engine="engine"),
        e.ContinueGeneration(engine="engine"),
        e.BeginUpdate(engine="engine", target=2, label="run:2"),
        e.TransferWeights(engine="engine", index=0, bucket=Bucket(index=0, last=False)),
        e.TransferWeights(engine="engine", index=1, bucket=Bucket(index=1, last=True)),
        e.FinishUpdate(engine="engine", target=2, label="run:2"),
        e.VerifyWeights(engine="engine", target=2, label="run:2"),
        e.FlushCache(engine="engine"),
        e.LabelVersion(engine="engine", label="run:1"),
        e.Canary(engine="engine"),
        e.AbandonUpdate(engine="engine"),
        e.CloseTransfer(engine="engine"),
    ]
)


@given(st.lists(_REQUESTS, max_size=12))
def test_the_true_engine_is_the_scripted_engine(requests: list[e.Request]) -> None:
    """Whatever is asked of it in whatever order, it answers and becomes what users' test engine does."""
    engine, truth = ScriptedEngine(), Truth()
    for request in requests:
        truth, acknowledgement = act(truth, request, at_risk_from_begin=False)
        expected = engine._act(request)
        assert (acknowledgement.outcome, acknowledgement.stopped, acknowledgement.idle, acknowledgement.untouched) == (
            *(expected.outcome, expected.stopped, expected.idle, expected.untouched),
        )
        if acknowledgement.report is not None and expected.report is not None:
            told, wanted = acknowledgement.report, expected.report
            assert (told.paused, told.whole, told.label) == (wanted.paused, wanted.whole, wanted.label)
        label = None if truth.label is None else label_of("run", truth.label)
        assert (truth.paused, truth.whole, truth.session, label) == (
            *(engine.paused is not None, engine.whole, engine.session, engine.label),
        )


def test_the_command_prints_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    """States, edges, depth and seconds, and a good verdict."""
    assert main(["--engines", "1", "--faults", "0"]) == 0
    first, verdict = capsys.readouterr().out.splitlines()
    assert first.startswith("1 engines, at most 0 faults: ")
    assert [word.split()[-1] for word in first.split(", ")[1:]] == ["states", "edges", first.split(", ")[3][6:], "s"]
    assert verdict == "every predicate holds"


def test_the_command_fails_with_the_trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a predicate does not hold, the way there is printed and the exit code is 1."""
    serve_without_a_canary(monkeypatch)
    assert main(["--engines", "1", "--faults", "0"]) == 1
    assert "a_canary_comes_before_serving does not hold" in capsys.readouterr().out


@pytest.mark.parametrize("bounds", [{"engines": 0}, {"faults": -1}, {"buckets": 0}])
def test_bounds_that_leave_nothing_are_refused(bounds: dict[str, Any]) -> None:
    """Misuse is told before anything is explored."""
    with pytest.raises(ValueError, match="nothing to explore"):
        explore(**bounds)
