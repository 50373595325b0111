"""The error tree: what is drawn is what is there, and groups stay what they are."""

import re

import pytest

from lifecycle import Outcome, PauseMode, errors
from lifecycle.cohort import Cohort
from lifecycle.errors import (
    EngineFailure,
    LifecycleError,
    OperationFailed,
    PauseFailed,
    PublicationFailed,
    TransferFailed,
)
from lifecycle.fleet import Fleet
from lifecycle.states import Standing

from .workbench import publication_of, serving_cohort

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, LifecycleError) and kind is not LifecycleError
}


def _failure(engine: str = "left", detail: str = "no") -> EngineFailure:
    return EngineFailure(engine, "PauseGeneration", Outcome.UNKNOWN, detail)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Every error is drawn, with the builtin that it is by meaning."""
    drawn = dict(re.findall(r"[├└]── (\w+)(?: +\((\w+)\))?", errors.__doc__ or ""))
    assert set(drawn) == set(CLASSES)
    bases = {name: {base.__name__ for base in kind.__mro__} for name, kind in CLASSES.items()}
    assert [name for name, builtin in drawn.items() if builtin and builtin not in bases[name]] == []


@pytest.mark.parametrize("kind", [OperationFailed, PauseFailed, PublicationFailed])
def test_a_failed_operation_names_its_engines_once_and_in_order(kind: type[OperationFailed]) -> None:
    """Causes that are no engine's are kept, and are not taken for one."""
    error = kind("failed", [_failure("b"), TransferFailed("cut"), _failure("a"), _failure("b")])
    assert error.engines == ("b", "a")
    assert str(error).startswith("failed: b: PauseGeneration is UNKNOWN: no; cut; a: ")


def test_a_part_of_a_failed_operation_is_of_its_kind() -> None:
    """`except*` and `split` keep the class, so that handlers by class still work."""
    error = PauseFailed("failed", [_failure(), TransferFailed("cut")])
    engines, rest = error.split(EngineFailure)
    assert (type(engines), type(rest)) == (PauseFailed, PauseFailed)


def test_messages_stay_short() -> None:
    """A server's page of details, or a fleet of failures, does not make a page of a message."""
    assert len(str(_failure(detail="x" * 5000))) < 500
    assert len(str(OperationFailed("failed", [_failure(detail="x" * 200)] * 50))) <= 500


def test_members_are_those_of_the_publication_that_can_still_be_reached() -> None:
    """Without a publication every reachable engine is one."""
    cohort = serving_cohort("a", "b", "c")
    cohort.fleet.update("b", standing=Standing.LOST)
    without = cohort.members
    publication_of(cohort).members = ("a", "b")
    assert (without, cohort.members) == (("a", "c"), ("a",))


def test_a_cohort_begins_with_nothing_decided() -> None:
    """Closed to submission, without a version, and without a bound."""
    cohort = Cohort(fleet=Fleet(["a"]))
    assert (cohort.submission_open, cohort.generation_held, cohort.version, cohort.mode, cohort.required) == (
        False, False, None, PauseMode.ABORT, 1,
    )  # fmt: skip
