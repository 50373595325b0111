"""No engine is called without a deadline."""

import ast

import pytest

from .sites import FILES, Finder, called, sites, sites_in, stale, unlisted

_CALLS = (".perform", ".generate", ".exchange")
WITHOUT = {
    "adapters/engines/http.py::HttpEngine.perform": "a dialect does no I/O; each of its calls gets the deadline",
    "adapters/engines/http.py::HttpEngine.generate": "a dialect does no I/O; each of its calls gets the deadline",
    "lifecycle/controller.py::Lifecycle.generate": "not to an engine: each of its segments gets Deadlines.generate",
    "lifecycle/rollouts/values.py::Episode.generate": "not to an engine: Lifecycle.generate has deadlines",
    "adapters/frontends/demo/rollouts.py::answer": "not to an engine: Lifecycle.generate has deadlines",
}
"""Calls of these names that take no timeout, and why."""
EXCHANGES = {"adapters/engines/http.py::HttpEngine._call": "the one place where a dialect's call is made"}
SENDS = {
    "adapters/engines/connections.py::Connections.exchange": "where a request is written, within its deadline",
    "adapters/testing/proxy.py::FaultProxy._forward": "for as long as the client waits, which has the deadline",
}
_CLIENTS = {"requests", "aiohttp", "urllib", "urllib3"}


def _calls(node: ast.AST) -> bool:
    return called(node).endswith(_CALLS)


def _without_timeout(node: ast.AST) -> bool:
    if not _calls(node) or not isinstance(node, ast.Call):
        return False
    given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
    return not given or any(isinstance(value, ast.Constant) and value.value is None for value in given)


def _exchanges(node: ast.AST) -> bool:
    return called(node).endswith(".exchange")


def _sends(node: ast.AST) -> bool:
    return called(node).endswith(".handle_async_request")


def _asks_otherwise(node: ast.AST) -> bool:
    """Whether HTTP is spoken past the driver."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""] if node.level == 0 else []
    else:
        short = ("get", "post", "put", "request", "stream", "Client", "AsyncClient", "HTTPTransport")
        return called(node) in {f"httpx.{name}" for name in short}
    return any(name.partition(".")[0] in _CLIENTS or name == "http.client" for name in names)


def test_every_call_to_an_engine_has_a_deadline() -> None:
    """Whoever performs, generates or exchanges passes a timeout, which is not `None`."""
    found = sites(_without_timeout)
    assert unlisted(found, WITHOUT) == []
    assert stale(found, WITHOUT) == []


def test_there_are_calls_to_look_at() -> None:
    """The rule above is about the core, the driver, and what uses them."""
    assert {site.where for site in sites(_calls)} > set(WITHOUT)
    assert len(FILES) > 50


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [(_exchanges, EXCHANGES), (_sends, SENDS), (_asks_otherwise, {})],
    ids=["exchange", "write", "past the driver"],
)
def test_every_http_call_goes_one_way(rule: Finder, allowed: dict[str, str]) -> None:
    """A dialect's call is made in one place, and a request is written in one place: both with the deadline at hand."""
    found = sites(rule)
    assert unlisted(found, allowed) == []
    assert stale(found, allowed) == []


@pytest.mark.parametrize("source", ["port.perform(r, f)", "lane.exchange(r, timeout=None)", "a.b.generate(r, sent=s)"])
def test_a_call_without_a_deadline_would_be_found(source: str) -> None:
    """The rule sees what it forbids."""
    assert sites_in(source, _without_timeout) != []


@pytest.mark.parametrize("source", ["import http.client", "from urllib.request import urlopen", "httpx.get(url)"])
def test_a_call_past_the_driver_would_be_found(source: str) -> None:
    """The rule sees what it forbids."""
    assert sites_in(source, _asks_otherwise) != []
