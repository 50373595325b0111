"""What must be known after a request that meets a fault: the one table, and the rules that it is written from.

- Where no connection was made nothing was done, and the engine is unreachable.
- A lost reply is UNKNOWN, whether the request was carried out or not; so is a reply that is no answer.
- A 4xx is a refusal: nothing was done, and the engine is well. 429 is one that passes.
- A 5xx is UNKNOWN, since a gateway may have sent the request on; unless the server says that it is dead.
- A 200 whose body takes it back is a refusal.
- Only a call that may be made twice is made again.
"""

from collections.abc import Mapping

from attrs import evolve, field, frozen

from adapters.testing import Answer, Drop, Fault, HalfClose, Silence, TruncateBody, TruncateJSON
from lifecycle import events as e
from lifecycle.errors import EngineUnavailable, GenerationRefused, LifecycleError
from lifecycle.states import Outcome, PauseMode
from tests.adapters.engines.dialogue import BUCKET, CHANNEL

ATTEMPTS = 3
"""How often a call is made that may be repeated: `HttpEngine(retries=2)`."""


@frozen(kw_only=True)
class Asked:
    """A request, and the route at which it meets the fault."""

    request: e.Request | None
    """`None`: a generation."""
    routes: Mapping[str, str]
    repeatable: bool
    """Whether the call may be made twice."""


def _asked(request: e.Request | None, sglang: str, vllm: str, *, repeatable: bool) -> Asked:
    return Asked(request=request, routes={"sglang": sglang, "vllm": vllm}, repeatable=repeatable)


LABEL = "run:8"
REQUESTS: Mapping[str, Asked] = {
    "probe": _asked(e.ProbeEngine(), "/model_info", "/version", repeatable=True),
    "abort": _asked(e.AbortGeneration(), "/abort_request", "/abort_requests", repeatable=True),
    "pause": _asked(e.PauseGeneration(mode=PauseMode.ABORT), "/pause_generation", "/pause", repeatable=True),
    "continue": _asked(e.ContinueGeneration(), "/continue_generation", "/resume", repeatable=True),
    "init group": _asked(
        e.OpenTransfer(channel=CHANNEL),
        "/init_weights_update_group",
        "/init_weight_transfer_engine",
        repeatable=False,
    ),
    "begin": _asked(
        e.BeginUpdate(kind="broadcast", label=LABEL), "/begin_weight_update", "/start_weight_update", repeatable=False
    ),
    "transfer": _asked(
        e.TransferWeights(bucket=BUCKET, channel=CHANNEL, label=LABEL),
        "/update_weights_from_distributed",
        "/update_weights",
        repeatable=False,
    ),
    "finish": _asked(
        e.FinishUpdate(kind="broadcast", label=LABEL), "/end_weight_update", "/finish_weight_update", repeatable=False
    ),
    "abandon": _asked(
        e.AbandonUpdate(kind="broadcast"), "/end_weight_update", "/finish_weight_update", repeatable=True
    ),
    "flush": _asked(e.FlushCache(), "/flush_cache", "/reset_prefix_cache", repeatable=True),
    "destroy group": _asked(
        e.CloseTransfer(channel=CHANNEL),
        "/destroy_weights_update_group",
        "/shutdown_weight_transfer_engine",
        repeatable=False,
    ),
    "generate": _asked(None, "/generate", "/inference/v1/generate", repeatable=True),
}


@frozen(kw_only=True)
class Known:
    """What is known after a request, and how often its call arrived."""

    outcome: Outcome = Outcome.UNKNOWN
    unreachable: bool = False
    untouched: bool = False
    arrivals: int = 1
    raised: type[LifecycleError] | None = None
    """By a generation, which has no outcome."""


@frozen(kw_only=True)
class Rule:
    """A fault, and what is known after it."""

    fault: Fault | None
    """`None`: the connection is refused."""
    known: Known = field(factory=Known)
    again: bool = False
    """Whether a call that may be repeated is."""
    refusal: bool = False
    """Whether it was answered before the engine had touched anything."""
    raised: type[LifecycleError] = EngineUnavailable


_REFUSED = Known(outcome=Outcome.NOT_DONE)
_DEAD = Known(outcome=Outcome.NOT_DONE, unreachable=True)
_EXCUSES = {"error": {"message": "EngineCore encountered an issue. See stack trace above for the root cause."}}
_DENIED = {"success": False, "message": "it did not work", "status": "error"}


def _refusal(status: int) -> Rule:
    return Rule(fault=Answer(status, {"message": "no"}), known=_REFUSED, refusal=True, raised=GenerationRefused)


FAULTS: Mapping[str, Rule] = {
    "refused connection": Rule(fault=None, known=evolve(_DEAD, arrivals=0)),
    "silence": Rule(fault=Silence(applied=True)),
    "dropped before": Rule(fault=Drop(), again=True),
    "dropped after": Rule(fault=Drop(applied=True), again=True),
    "reset before": Rule(fault=Drop(reset=True), again=True),
    "reset after": Rule(fault=Drop(applied=True, reset=True), again=True),
    "half-closed": Rule(fault=HalfClose(), again=True),
    "truncated body": Rule(fault=TruncateBody(0), again=True),
    "400": _refusal(400),
    "401": _refusal(401),
    "403": _refusal(403),
    "404": _refusal(404),
    "409": _refusal(409),
    "429": evolve(_refusal(429), again=True, raised=EngineUnavailable),
    "500": Rule(fault=Answer(500, {"message": "boom"}, applied=True)),
    "502": Rule(fault=Answer(502, "<html>bad gateway</html>", applied=True)),
    "503": Rule(fault=Answer(503, "upstream connect error or disconnect/reset before headers")),
    "504": Rule(fault=Answer(504, "<html>gateway timeout</html>", applied=True)),
    "dead": Rule(fault=Answer(500, _EXCUSES), known=_DEAD),
    "200 that failed": Rule(fault=Answer(200, _DENIED), known=_REFUSED),
    "200 not JSON": Rule(fault=Answer(200, "<html>sign in first</html>")),
    "truncated JSON": Rule(fault=TruncateJSON(3)),
}

_DONE = Known(outcome=Outcome.DONE)

EXCEPTIONS: Mapping[tuple[str, str, str], Known] = {
    # Servers before weight-update sessions have no such route, and need none.
    ("sglang", "begin", "404"): _DONE,
    # Where there is no session there is none to close.
    ("sglang", "abandon", "404"): evolve(_DONE, untouched=True),
    ("vllm", "abandon", "404"): _DONE,
    # Its body is empty, so that nothing of it can be missing.
    ("sglang", "abort", "truncated body"): _DONE,
    # These two answer in plain text, of which the first letters are as good as the whole.
    ("sglang", "abort", "truncated JSON"): _DONE,
    ("sglang", "flush", "truncated JSON"): _DONE,
    # A bucket that SGLang could not load is a 400, too: only its own words tell whether anything was written.
    ("sglang", "transfer", "400"): _REFUSED,
}
"""Rows in which a dialect knows better than the rules."""


def expected(dialect: str, request: str, fault: str) -> Known:
    """Return what must be known after `request` met `fault`."""
    if (better := EXCEPTIONS.get((dialect, request, fault))) is not None:
        return better
    rule, asked = FAULTS[fault], REQUESTS[request]
    generation = asked.request is None
    # A generation that is turned away for now goes to another engine at once.
    again = rule.again and asked.repeatable and not (generation and rule.refusal)
    arrivals = ATTEMPTS if again else rule.known.arrivals
    if generation:
        return Known(raised=rule.raised, arrivals=arrivals)
    return evolve(rule.known, arrivals=arrivals, untouched=rule.refusal and request == "transfer")
