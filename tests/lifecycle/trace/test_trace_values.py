"""A value that was forged is accused: of the right thing, at its line or where it was relied on."""

from typing import Any

import pytest
from attrs import evolve

from lifecycle import Outcome, Standing, State, Trigger, events
from lifecycle.events import Event

from .forging import accusations, index_of, index_of_after
from .recordings import recording

Forgery = tuple[str, type[Event], dict[str, Any], dict[str, Any], str]

FORGERIES: dict[str, Forgery] = {
    "a state that the table does not lead to": (
        "several publications",
        events.TransitionCommitted,
        {"trigger": Trigger.PAUSE_GENERATION},
        {"target": State.UPDATING},
        "legal-transition",
    ),
    "a transition from another state": (
        "several publications",
        events.TransitionBegun,
        {"trigger": Trigger.PAUSE_GENERATION},
        {"source": State.RUNNING},
        "legal-transition",
    ),
    "an end from another state": (
        "several publications",
        events.TransitionBegun,
        {"trigger": Trigger.CLOSE},
        {"source": State.SUSPENDED},
        "legal-transition",
    ),
    "another transition than was begun": (
        "several publications",
        events.TransitionCommitted,
        {"trigger": Trigger.SUSPEND},
        {"trigger": Trigger.RESUME},
        "legal-transition",
    ),
    "a version that nobody published": (
        "several publications",
        events.RolloutAdmitted,
        {"ticket": 4},
        {"version": 7},
        "version-monotonic",
    ),
    "a version that goes back": (
        "several publications",
        events.VersionAdvanced,
        {"version": 2},
        {"version": 0},
        "version-monotonic",
    ),
    "a version other than the one begun": (
        "several publications",
        events.VersionAdvanced,
        {"version": 2},
        {"version": 5},
        "version-monotonic",
    ),
    "another version before": (
        "several publications",
        events.VersionAdvanced,
        {"version": 2},
        {"previous": 0},
        "version-monotonic",
    ),
    "an update that goes back": (
        "several publications",
        events.BeginUpdate,
        {"target": 3},
        {"target": 1, "label": "run:1"},
        "version-advances",
    ),
    "an epoch that did not begin": ("several publications", events.PauseGeneration, {}, {"epoch": 9}, "epoch"),
    "an engine that is not in the fleet": (
        "several publications",
        events.PauseGeneration,
        {},
        {"engine": "E9"},
        "known-engine",
    ),
    "the wrong engine's answer": (
        "several publications",
        events.EnginePaused,
        {"engine": "E1"},
        {"engine": "E2"},
        "one-fact-a-request",
    ),
    "another run's label": (
        "several publications",
        events.LabelVersion,
        {"version": 1},
        {"label": "other:1"},
        "label",
    ),
    "the label of another version": (
        "several publications",
        events.FinishUpdate,
        {"target": 1},
        {"label": "run:2"},
        "label",
    ),
    "weights of another version": (
        "several publications",
        events.TransferWeights,
        {"target": 1},
        {"target": 2, "label": "run:2"},
        "version-monotonic",
    ),
    "a ticket given out again": (
        "several publications",
        events.RolloutAdmitted,
        {"ticket": 4},
        {"ticket": 3},
        "ticket-once",
    ),
    "a ticket settled that is not out": (
        "several publications",
        events.RolloutSettled,
        {"ticket": 13},
        {"ticket": 99},
        "ticket-once",
    ),
    "another version at admission": (
        "several publications",
        events.RolloutSettled,
        {"ticket": 7},
        {"admitted": 0},
        "staleness",
    ),
    "a staleness that is not so": (
        "several publications",
        events.RolloutConsumed,
        {"staleness": 1},
        {"staleness": 0},
        "staleness",
    ),
    "a rollout trained on that was rejected": (
        "several publications",
        events.RolloutConsumed,
        {},
        {"ticket": 13},
        "ticket-once",
    ),
    "a generation to a fenced engine": (
        "crashed engine",
        events.GenerationSent,
        {"version": 1, "engine": "E2"},
        {"engine": "E1"},
        "routing",
    ),
    "a generation without a ticket": (
        "several publications",
        events.GenerationSent,
        {},
        {"ticket": 50},
        "admission",
    ),
    "a standing that it did not have": (
        "several publications",
        events.StandingChanged,
        {"before": Standing.STALE},
        {"before": Standing.LOST},
        "standing",
    ),
    "service while partly written": (
        "failed transfer",
        events.StandingChanged,
        {"reason": "weights are being written"},
        {"after": Standing.SERVING},
        "dirty-never-serves",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_value_is_seen_where_it_is(name: str) -> None:
    """A value that cannot have been is told at its line, by the rule that it breaks."""
    scenario, kind, wanted, forged, rule = FORGERIES[name]
    trace = list(recording(scenario))
    index = index_of(tuple(trace), kind, **wanted)
    trace[index] = evolve(trace[index], **forged)
    assert (index + 1, rule) in accusations(trace)


LATER: dict[str, tuple[str, type[Event], dict[str, Any], dict[str, Any], type[Event], dict[str, Any], str]] = {
    "a pause that did not happen": (
        "several publications",
        events.EnginePaused,
        {"engine": "E1"},
        {"outcome": Outcome.NOT_DONE},
        events.TransitionCommitted,
        {"target": State.PAUSED},
        "pauses-matched",
    ),
    "a pause that is not known to have happened": (
        "several publications",
        events.EnginePaused,
        {"engine": "E1"},
        {"outcome": Outcome.UNKNOWN},
        events.DebtSettled,
        {"engine": "E1"},
        "pauses-matched",
    ),
    "a pause that happened after all": (
        "failed pause",
        events.EnginePaused,
        {"engine": "E1"},
        {"outcome": Outcome.DONE},
        events.DebtSettled,
        {"engine": "E1"},
        "pauses-matched",
    ),
    "a pause that left requests in the engine": (
        "several publications",
        events.EnginePaused,
        {"engine": "E1"},
        {"idle": False},
        events.TransitionCommitted,
        {"target": State.PAUSED},
        "stopped",
    ),
    "a continue that did not happen": (
        "several publications",
        events.EngineContinued,
        {"engine": "E1"},
        {"outcome": Outcome.UNKNOWN},
        events.DebtSettled,
        {"engine": "E1"},
        "pauses-matched",
    ),
    "an engine that has not proven its pause": (
        "several publications",
        events.PauseProven,
        {"engine": "E2"},
        {"outcome": Outcome.UNKNOWN},
        events.BeginUpdate,
        {"engine": "E2"},
        "stopped",
    ),
    "a session that was not opened": (
        "several publications",
        events.UpdateBegun,
        {"engine": "E2"},
        {"outcome": Outcome.UNKNOWN},
        events.TransitionCommitted,
        {"target": State.UPDATING},
        "session-open",
    ),
    "weights for a session that was not opened": (
        "several publications",
        events.UpdateBegun,
        {"engine": "E2"},
        {"outcome": Outcome.UNKNOWN},
        events.TransferWeights,
        {"engine": "E2"},
        "session-open",
    ),
    "a fleet that is too small": (
        "crashed engine",
        events.LifecycleOpened,
        {},
        {"min_engines": 2},
        events.TransitionBegun,
        {"trigger": Trigger.FINISH_UPDATE},
        "enough-reachable",
    ),
    "a bucket that did not arrive": (
        "several publications",
        events.WeightsTransferred,
        {"engine": "E2"},
        {"outcome": Outcome.NOT_DONE},
        events.TransitionCommitted,
        {"trigger": Trigger.TRANSFER},
        "bucket-acknowledged",
    ),
    "weights that were not finished": (
        "several publications",
        events.UpdateFinished,
        {"engine": "E2"},
        {"outcome": Outcome.NOT_DONE},
        events.VerifyWeights,
        {"engine": "E2"},
        "legal-order",
    ),
    "weights that did not pass verification": (
        "several publications",
        events.WeightsVerified,
        {"engine": "E2"},
        {"outcome": Outcome.NOT_DONE},
        events.VersionAdvanced,
        {},
        "verified-before-commit",
    ),
    "a session that was not closed": (
        "failed transfer",
        events.UpdateAbandoned,
        {"engine": "E2"},
        {"outcome": Outcome.UNKNOWN},
        events.TransitionCommitted,
        {"trigger": Trigger.ABANDON_UPDATE},
        "sessions-closed",
    ),
    "an engine that labels its tokens otherwise": (
        "several publications",
        events.VersionLabelled,
        {"engine": "E1", "version": 1},
        {"outcome": Outcome.NOT_DONE},
        events.StandingChanged,
        {"engine": "E1", "version": 1, "after": Standing.SERVING},
        "fit-to-serve",
    ),
    "a cache of old weights": (
        "several publications",
        events.CacheFlushed,
        {"engine": "E1", "version": 1},
        {"outcome": Outcome.UNKNOWN},
        events.StandingChanged,
        {"engine": "E1", "version": 1, "after": Standing.SERVING},
        "fit-to-serve",
    ),
    "an engine that holds another version": (
        "killed trainer",
        events.EngineProbed,
        {"engine": "E1", "label": "run:0"},
        {"label": "run:5"},
        events.StandingChanged,
        {"engine": "E1", "after": Standing.SERVING},
        "versions-agree",
    ),
    "an engine found paused": (
        "several publications",
        events.EngineProbed,
        {"engine": "E1"},
        {"paused": True},
        events.TransitionCommitted,
        {"trigger": Trigger.ATTACH},
        "pauses-matched",
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_a_forged_outcome_is_seen_where_it_was_relied_on(name: str) -> None:
    """An outcome by itself may be true; what the lifecycle made of it gives the forgery away."""
    scenario, kind, wanted, forged, later, there, rule = LATER[name]
    trace = list(recording(scenario))
    index = index_of(tuple(trace), kind, **wanted)
    seen = index_of_after(trace, index, later, there)
    trace[index] = evolve(trace[index], **forged)
    assert (seen + 1, rule) in accusations(trace)
