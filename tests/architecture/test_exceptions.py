"""No exception is swallowed."""

import ast

import pytest

from .sites import Finder, called, sites, sites_in, stale, unlisted

SUPPRESSED = {
    "lifecycle/journal.py::Journal.close": "what could not be written was told by the sync before",
    "lifecycle/rollouts/datasets.py::Stream.batch": "no error: those who wait look again, and wait on",
    "lifecycle/rollouts/running.py::_Call.run": "an event loop that is gone awaits no thread",
    "adapters/engines/process.py::EmbeddedEngine.stop": "a process that does not heed SIGTERM is killed next",
    "adapters/engines/process.py::_signal": "who is gone already has ended, which was asked for",
    "adapters/frontends/demo/fleet.py::own_address": "a host that is not found has its say when it is attached to",
    "adapters/transfers/process_group.py::_connections": "another torch may name keys otherwise: timeouts are left",
    "adapters/transfers/sockets.py::find": "a socket that is not connected is none of those that are looked for",
    "adapters/transfers/sockets.py::cut": "a connection that the peer has cut is cut",
    "adapters/transfers/vllm_plugin/group.py::Group.close": "a group that broke needs no abort",
    "adapters/transfers/vllm_plugin/replies.py::in_step.taking_all": "of several errors the first is raised",
}
"""Where `contextlib.suppress` is right, and why."""
KEPT = {
    "lifecycle/recorder.py::_call": "a subscriber is called synchronously: what it raises is its own, and is logged",
    "lifecycle/rollouts/running.py::in_context": "thrown into the coroutine, which raises it or not",
    "lifecycle/rollouts/running.py::_Call.run": "raised where the call is awaited",
    "adapters/engines/embedded/scheduler.py::Scheduler.call.run": "handed to the thread that asked, by its future",
    "adapters/engines/embedded/scheduler.py::Scheduler._run": "a scheduler that dies tells the server, which ends",
}
"""Where everything, cancellations included, is caught and not raised again there, and why."""


_EVERYTHING = "BaseException"
_CANCELLATIONS = ("genuine()", "get_cancelled_exc_class()")
"""What a handler before it may let through: then the rest is no cancellation."""


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in body
    )


def _passes_over(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler) and _does_nothing(node.body)


def _catches_without_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler) and node.type is None


def _keeps_everything(node: ast.AST) -> bool:
    """Whether a `try` catches cancellations and goes on."""
    if not isinstance(node, ast.Try):
        return False
    for handler in node.handlers:
        words = ast.unparse(handler.type) if handler.type is not None else ""
        if any(word in words for word in _CANCELLATIONS) and _raises(handler.body):
            return False
        if _EVERYTHING in words and not _raises(handler.body):
            return True
    return False


def _raises(body: list[ast.stmt]) -> bool:
    return any(isinstance(leaf, ast.Raise) for statement in body for leaf in ast.walk(statement))


def _suppresses(node: ast.AST) -> bool:
    return called(node) in {"suppress", "contextlib.suppress"}


def test_no_exception_is_passed_over() -> None:
    """No handler does nothing: what is caught is answered, kept, or raised."""
    assert [str(site) for site in sites(_passes_over)] == []


def test_no_handler_catches_without_saying_what() -> None:
    """There is no bare `except`."""
    assert [str(site) for site in sites(_catches_without_a_name)] == []


def test_a_cancellation_is_raised_again() -> None:
    """Whoever catches `BaseException` raises, but where a reason says who does it instead."""
    found = sites(_keeps_everything)
    assert unlisted(found, KEPT) == []
    assert stale(found, KEPT) == []


def test_errors_are_suppressed_only_where_there_is_a_reason() -> None:
    """Every `suppress` is listed with why that error says nothing; every reason is still needed."""
    found = sites(_suppresses)
    assert unlisted(found, SUPPRESSED) == []
    assert stale(found, SUPPRESSED) == []


@pytest.mark.parametrize(
    ("handler", "rule"),
    [
        ("except ValueError: pass", _passes_over),
        ("except ValueError: ...", _passes_over),
        ("except: raise", _catches_without_a_name),
        ("except BaseException: log()", _keeps_everything),
        ("except (OSError, BaseException) as e: return", _keeps_everything),
    ],
)
def test_a_swallowed_exception_would_be_found(handler: str, rule: Finder) -> None:
    """The rules see what they forbid."""
    assert sites_in(f"def f():\n    try: g()\n    {handler}", rule) != []


@pytest.mark.parametrize("call", ["with suppress(OSError): g()", "with contextlib.suppress(A, B): g()"])
def test_a_suppression_would_be_found(call: str) -> None:
    """The rule sees what it forbids."""
    assert sites_in(call, _suppresses) != []


@pytest.mark.parametrize(
    "handlers",
    ["except BaseException:\n    if g(): h()\n    raise", "except genuine(): raise\nexcept BaseException: g()"],
    ids=["after cleaning up", "at once"],
)
def test_an_exception_that_is_raised_again_is_not_swallowed(handlers: str) -> None:
    """Cleaning up and raising is what `except BaseException` is for; foreign ones may be kept where ours are raised."""
    assert sites_in(f"try: f()\n{handlers}", _keeps_everything) == []
