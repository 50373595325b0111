"""The explorer finds bugs that are made on purpose, by a shortest way."""

import pytest

from lifecycle.explore import explore

from .mutations import MUTATIONS, Mutation, take_unknown_for_not_done


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_bug_is_found_by_a_shortest_way(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug breaks the predicate that is about it, with as few faults, and in as few steps, as it takes."""
    mutation.bug(monkeypatch)
    counterexample = explore(engines=1, faults=mutation.faults, **mutation.options).counterexample
    assert counterexample is not None
    assert counterexample.predicate == mutation.predicate
    assert (counterexample.faults, len(counterexample.steps)) == (mutation.faults, mutation.steps), str(counterexample)


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.faults], ids=str)
def test_a_bug_needs_the_faults_that_its_counterexample_has(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one fault fewer nothing is found: the counterexample has the fewest."""
    mutation.bug(monkeypatch)
    assert explore(engines=1, faults=mutation.faults - 1, **mutation.options).holds


def test_wider_bounds_do_not_lengthen_a_counterexample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest way is found where there are more engines and more faults, too."""
    take_unknown_for_not_done(monkeypatch)
    counterexample = explore(engines=2, faults=2).counterexample
    assert counterexample is not None
    assert (counterexample.faults, len(counterexample.steps)) == (1, 2)


def test_a_counterexample_is_a_trace_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is broken, what was done, what went wrong there, and how everything stands after each step."""
    take_unknown_for_not_done(monkeypatch)
    found = explore(engines=1, faults=1)
    assert str(found.counterexample).splitlines() == [
        "every_pause_is_on_record does not hold: E1 is paused, and no debt is on record",
        "after 2 steps and 1 faults:",
        "1. ATTACH -> SUSPENDED",
        "        E1: believed SERVING, version 1; in truth version 1",
        "2. PAUSE_GENERATION -> SUSPENDED (abort pause failed: E1: PauseGeneration is UNKNOWN: no reply)",
        "    PauseGeneration at E1: done, and the reply is lost",
        "        E1: believed SERVING, version 1, paused perhaps; in truth version 1, paused",
    ]
    assert str(found).startswith("1 engines, at most 1 faults: ")
