"""An explicit state machine for the hand-over of new weights to inference engines.

Begin with `lifecycle.table`, the transition table; `Lifecycle` is what a trainer holds.
"""

from . import errors, events
from .cohort import FleetPolicy
from .controller import Lifecycle
from .deadlines import Deadlines
from .generation import Generation, GenerationRequest, Segment, Tokens
from .ledger import PauseLedger
from .machine import LifecycleMachine
from .rollouts import Episode, Rollout, RolloutExecutor, RolloutStatus
from .staleness import StalenessBudget
from .states import MeasuredFrom, OnStale, Outcome, PauseMode, Standing, State, Trigger
from .table import TRANSITIONS, Transition
from .ticket import Ticket
from .views import EngineView, PublishReport

__all__ = [
    "TRANSITIONS",
    "Deadlines",
    "EngineView",
    "Episode",
    "FleetPolicy",
    "Generation",
    "GenerationRequest",
    "Lifecycle",
    "LifecycleMachine",
    "MeasuredFrom",
    "OnStale",
    "Outcome",
    "PauseLedger",
    "PauseMode",
    "PublishReport",
    "Rollout",
    "RolloutExecutor",
    "RolloutStatus",
    "Segment",
    "StalenessBudget",
    "Standing",
    "State",
    "Ticket",
    "Tokens",
    "Transition",
    "Trigger",
    "errors",
    "events",
]
