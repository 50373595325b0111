"""Nothing waits for a fixed time where an event exists."""

import ast

import pytest

from .sites import called, sites, sites_in, stale, unlisted

_SLEEPS = {f"{module}.{name}" for module in ("anyio", "asyncio", "trio", "time") for name in ("sleep", "sleep_until")}
_SLEEPS |= {"sleep", "sleep_until"}

ALLOWED = {
    "lifecycle/effects.py::Effects._until_known": "backoff before a request is sent again, within its deadline",
    "lifecycle/procedures/attaching.py::Attaching._probe": "backoff between probes of servers that still start",
    "lifecycle/testing/scripted.py::ScriptedEngine.perform": "the delay that a test asked for",
    "adapters/testing/proxy.py::_wait": "the delay that a test asked for",
    "adapters/engines/http.py::HttpEngine._call": "backoff before a call is made again, within its deadline",
    "adapters/engines/embedded/server.py::EmbeddedServer._end_with": "nobody is told that a parent ended",
    "adapters/engines/embedded/sglang_manager.py::TokenizerManager.pause": "polls as SGLang does: for its lock",
    "adapters/engines/embedded/sglang_manager.py::TokenizerManager.alive": "polls as SGLang does: its health check",
    "adapters/engines/embedded/sglang_routes.py::_Control.flush_cache": "polls as SGLang does: until it is idle",
    "adapters/frontends/guard.py::_after_silence": "silence in another process's file is time that passes",
    "adapters/transfers/rendezvous.py::Rendezvous._linger": "who comes too late to a rendezvous does not announce it",
    "adapters/transfers/rendezvous.py::_reach": "a port that nobody listens on does not tell",
    "adapters/transfers/vllm_plugin/group.py::_reach": "a port that nobody listens on does not tell",
}
"""Where a wait of some seconds is right, and why."""


def _sleeps(node: ast.AST) -> bool:
    return called(node) in _SLEEPS


def _sleeps_a_number(node: ast.AST) -> bool:
    """Whether the time to sleep is written there and then."""
    if not _sleeps(node) or not isinstance(node, ast.Call):
        return False
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    return any(isinstance(leaf, ast.Constant) for value in given for leaf in [value, *ast.iter_child_nodes(value)])


def test_nothing_sleeps_a_number_of_seconds() -> None:
    """No sleep in the library has its time written into the call, not even where sleeping is right."""
    assert [str(site) for site in sites(_sleeps_a_number)] == []


def test_nothing_sleeps_but_where_there_is_a_reason() -> None:
    """Every wait for time to pass is listed with why there is no event to wait for; every reason is still needed."""
    found = sites(_sleeps)
    assert unlisted(found, ALLOWED) == []
    assert stale(found, ALLOWED) == []


@pytest.mark.parametrize("source", ["anyio.sleep(1)", "time.sleep(seconds=0.5)", "sleep(-1)", "asyncio.sleep(2 * x)"])
def test_a_fixed_sleep_would_be_found(source: str) -> None:
    """The rule sees what it forbids."""
    assert sites_in(source, _sleeps_a_number) != []


@pytest.mark.parametrize("source", ["anyio.sleep_forever()", "engine.sleep(level=1)", "clock.wait(1)"])
def test_what_is_no_sleep_is_not_found(source: str) -> None:
    """Waiting for ever is for a cancellation, and engines can be put to sleep."""
    assert sites_in(source, _sleeps) == []


def test_an_exception_that_is_not_needed_or_not_explained_would_be_found() -> None:
    """A list of exceptions shrinks with the code: what no site needs fails, and so does what gives no reason."""
    found = sites_in("def wait(): anyio.sleep(seconds)", _sleeps)
    assert unlisted(found, {}) == ["here.py::wait (line 1)"]
    assert stale(found, {"here.py::wait": "polls", "here.py::gone": "polls"}) == ["here.py::gone"]
    assert stale(found, {"here.py::wait": ""}) == ["here.py::wait"]
