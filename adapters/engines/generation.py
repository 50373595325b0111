"""What every dialect needs to read a generation, whole or streamed, and to say what went wrong with it."""

import re
from typing import Any

from lifecycle import errors
from lifecycle.generation import GenerationRequest, Segment, VersionSpan

from .dialect import HttpReply, Reply, classify, status_of, words_of


def new_tokens(request: GenerationRequest) -> int:
    """Return how many tokens may be generated: both bounds kept. Raises `GenerationRefused` when none may."""
    if request.max_tokens is None:
        return request.max_new_tokens
    room = request.max_tokens - len(request.input_ids)
    if room < 1:
        raise errors.GenerationRefused(
            f"a prompt of {len(request.input_ids)} tokens leaves no room in a context of {request.max_tokens}"
        )
    return min(request.max_new_tokens, room)


def generation_body(reply: Reply, *, engine: str) -> dict[str, Any]:
    """Return the JSON object of a generation reply, or raise what its absence means."""
    ack = classify(reply)
    if ack.done and isinstance(reply, HttpReply) and isinstance(reply.data, dict) and "error" not in reply.data:
        return reply.data
    detail = ack.detail
    if isinstance(reply, HttpReply) and not ack.done and (reply.json or reply.status >= 300):
        detail = f"HTTP {reply.status}: {said_of_generation(reply)}".removesuffix(": ")
    if refuses(status_of(reply)):
        raise errors.GenerationRefused(f"{engine} refused a generation request: {detail}")
    raise errors.EngineUnavailable(engine, detail or "the reply is not a generation")


_QUOTED = re.compile(
    r"""\\*['"]?\b(?:input|input_value|input_ids|prompt|prompt_token_ids|token_ids|text)\b\\*['"]?\s*[:=]"""
)
_INT = r"-?\d+(?:\.0)?"
_APART = r"""(?:[\s,;|'"\[\]()]|\\+[nrt"'])+"""
_TOKENS = re.compile(
    rf"""[\[(]*['"]?(?<![\w.]){_INT}(?:{_APART}{_INT}){{2,}}(?!\.\d)['"]?[\])]*|\[\s*{_INT}(?:[\s,]+{_INT})?[\s,]*\]"""
)


def said_of_generation(reply: HttpReply) -> str:
    """Return the server's own words, at most 300 characters, without what they may hold of a prompt.

    Servers echo what they refuse. The words end where a field is quoted; three integers and more in a row, however they
    are separated, and every list of integers, become `[...]`.
    """
    return without_tokens(words_of(reply))[:300]


def without_tokens(text: str) -> str:
    """Return a server's words about a generation without what they may hold of its prompt."""
    return _TOKENS.sub("[...]", _QUOTED.split(text, maxsplit=1)[0])


def refuses(status: int) -> bool:
    """Whether a status is for good: 408 and 429 pass, every other 4xx would be answered to the same request again."""
    return 400 <= status < 500 and status not in {408, 429}


def segment(
    *, engine: str, ids: Any, logprobs: Any, finish_reason: str, spans: tuple[VersionSpan, ...] | None
) -> Segment:
    """Return a segment, or raise `EngineUnavailable` when tokens and log-probabilities do not belong together."""
    ids, logprobs = tuple(ids or ()), tuple(logprobs or ())
    if len(ids) != len(logprobs) or None in logprobs:
        raise out_of_step(engine, len(ids), len(logprobs))
    return Segment(output_ids=ids, logprobs=logprobs, finish_reason=finish_reason, spans=spans, engine=engine)


def out_of_step(engine: str, ids: int, logprobs: int) -> errors.EngineUnavailable:
    """Return the error for tokens whose log-probabilities are not theirs."""
    return errors.EngineUnavailable(engine, f"{ids} tokens came with {logprobs} log-probabilities")


def version_spans(entries: Any) -> tuple[VersionSpan, ...] | None:
    """Return the spans in a reply's `weight_versions`; `None` where it has none or they cannot be read."""
    if not isinstance(entries, list):
        return None
    try:
        return tuple(VersionSpan(label=str(e["version"]), start=int(e["start"]), end=int(e["end"])) for e in entries)
    except (KeyError, TypeError, ValueError):
        return None
