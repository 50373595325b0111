"""Facts about engines, weight labels, and how both are shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import PauseMode, Standing
from lifecycle.fleet import Fleet, incarnation_changed, label_of, version_of
from lifecycle.ports import EngineReport
from lifecycle.views import engines_of
from tests.strategies import QUICK

from .workbench import serving_cohort


def test_engines_share_no_name() -> None:
    """Two engines of one name could not be told apart in any fact."""
    with pytest.raises(ValueError, match=r"engine names must be unique, got \['a', 'b', 'a'\]"):
        Fleet(["a", "b", "a"])


def test_an_engine_that_was_never_probed_is_lost() -> None:
    """Nothing is known of an engine until it answers, and nothing is routed to it."""
    facts = Fleet(["a"])["a"]
    assert (facts.standing, facts.reason, facts.reachable, facts.serving) == (
        Standing.LOST, "not attached yet", False, False,
    )  # fmt: skip


def test_a_change_makes_new_facts_and_leaves_the_old_as_they_were() -> None:
    """Facts are values: whoever holds some is not surprised by what comes later."""
    fleet = Fleet(["a"])
    before = fleet["a"]
    after = fleet.update("a", standing=Standing.STALE, dirty=True)
    assert (before.dirty, after.dirty, fleet["a"]) == (False, True, after)


def test_the_fleet_sorts_its_engines_by_standing() -> None:
    """Reachable are serving and stale; serving are serving; all in the order they were given."""
    fleet = Fleet(["a", "b", "c"])
    fleet.update("a", standing=Standing.STALE)
    fleet.update("c", standing=Standing.SERVING)
    assert [f.name for f in fleet.reachable] == ["a", "c"]
    assert [f.name for f in fleet.serving] == ["c"]
    assert (list(fleet), len(fleet), "b" in fleet) == (["a", "b", "c"], 3, True)


@QUICK
@given(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1), st.integers(0, 10**12))
def test_a_label_names_its_version_in_its_run_only(run: str, version: int) -> None:
    """What one run labels, that run reads back; another run does not take it for its own."""
    label = label_of(run, version)
    assert version_of(run, label) == version
    assert version_of(f"{run}x", label) is None


@pytest.mark.parametrize(
    "label", [None, "", "7", "run", "run:", "run:x", "run:-1", "run:1.5", "other:7", "/a/b", "run :7"]
)
def test_what_this_run_did_not_label_is_no_version(label: str | None) -> None:
    """Paths, other runs' versions and nothing at all say nothing about what the engine holds."""
    assert version_of("run", label) is None


@pytest.mark.parametrize(
    ("before", "now", "changed"), [(None, "1", False), ("1", None, False), ("1", "1", False), ("1", "2", True)]
)
def test_an_incarnation_changes_when_both_are_known_and_differ(
    before: str | None, now: str | None, changed: bool
) -> None:
    """A server that does not say is taken for the one it was."""
    facts = Fleet(["a"]).update("a", incarnation=before)
    assert incarnation_changed(facts, EngineReport(kind="scripted", incarnation=now)) is changed


def test_views_show_every_engine_with_its_debt_by_position_and_name() -> None:
    """Users find an engine by position or name, and what is asked for is not there raises `KeyError`."""
    cohort = serving_cohort(version=4)
    debt = cohort.ledger.owe("right", mode=PauseMode.ABORT, epoch=1)
    engines = engines_of(cohort)
    assert [(view.name, view.standing, view.version, view.debt) for view in engines] == [
        ("left", Standing.SERVING, 4, None),
        ("right", Standing.SERVING, 4, debt),
    ]
    assert (engines["right"], engines[1], engines[1:]) == (engines[-1], engines[-1], (engines[-1],))
    with pytest.raises(KeyError, match="middle"):
        engines["middle"]
