"""Exhaustive model checking of the real machine, ledger, guards, bookkeeper, procedures and driver.

`explore()` goes through every state that a fleet of k engines can come to with at most f faults: every outcome of every
request, pauses that land late, crashes, restarts, continues from outside, and cancellations, in every order. Only the
world is replaced (`world.World` stands in for `Effects`); the rest is what users run. What must hold is stated once, in
`predicates` and `conduct`. `python -m lifecycle.explore --engines 2 --faults 3` prints states, edges, depth, seconds,
and, where a predicate does not hold, a shortest way there.
"""

from .conduct import ON_EVENT, ON_REPLY, ON_REQUEST
from .exploring import explore
from .predicates import AT_REST
from .report import Counterexample, Exploration, TraceStep
from .truth import Truth

__all__ = [
    "AT_REST",
    "ON_EVENT",
    "ON_REPLY",
    "ON_REQUEST",
    "Counterexample",
    "Exploration",
    "TraceStep",
    "Truth",
    "explore",
]
