"""Which engine a generation request goes to. Synchronous; sends nothing."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set

import anyio

_SESSIONS_REMEMBERED = 100_000
_SUSPECT_SECONDS = 10.0
"""For how long an engine that did not answer is asked only where no other is left."""


class Router:
    """Knows how many requests each engine has, which did not answer lately, and where each session is."""

    def __init__(self, engines: Iterable[str]) -> None:
        self._load = dict.fromkeys(engines, 0)
        self._chosen = dict.fromkeys(self._load, 0)
        """When each was chosen last, counted in choices: between engines as busy as each other they take turns."""
        self._choices = 0
        self._suspect: dict[str, float] = {}
        """Engines that did not answer, and until when others are asked before them."""
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def choose(self, serving: Sequence[str], session: str | None) -> str:
        """Return the session's engine while it serves, otherwise the one with the fewest requests in flight.

        Costs time in proportion to the number of engines that serve, of which there must be at least one.
        """
        suspect = self._suspects()
        engine = self._sessions.get(session) if session is not None else None
        if engine is None or engine in suspect or engine not in serving:
            engine = min(serving, key=lambda name: (name in suspect, self._load[name], self._chosen[name]))
        if session is not None:
            self._remember(session, engine)
        self._choices += 1
        self._chosen[engine] = self._choices
        return engine

    def sent(self, engine: str) -> None:
        """Count a request as in flight."""
        self._load[engine] += 1

    def landed(self, engine: str) -> None:
        """Count a request as back."""
        self._load[engine] -= 1

    def suspect(self, engine: str) -> None:
        """Ask others before `engine` for a while: it did not answer."""
        self._suspect[engine] = anyio.current_time() + _SUSPECT_SECONDS

    def trust(self, engine: str) -> None:
        """Ask `engine` like any other again: it answered."""
        self._suspect.pop(engine, None)

    def _suspects(self) -> Set[str]:
        if not self._suspect:
            return frozenset()
        now = anyio.current_time()
        return {name for name, until in self._suspect.items() if now < until}

    def _remember(self, session: str, engine: str) -> None:
        self._sessions[session] = engine
        self._sessions.move_to_end(session)
        if len(self._sessions) > _SESSIONS_REMEMBERED:
            self._sessions.popitem(last=False)
