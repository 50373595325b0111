"""Generation as SGLang's `/generate` takes and answers it: token ids both ways."""

from typing import Any

from lifecycle import errors
from lifecycle.generation import GenerationRequest, Segment

from .generation import new_tokens, refuses, segment, version_spans, without_tokens
from .streaming import Arrivals, Chunk


def generate_body(request: GenerationRequest, *, stream: bool = False) -> dict[str, Any]:
    """Return the body for `/generate`."""
    body: dict[str, Any] = {
        "input_ids": list(request.input_ids),
        "sampling_params": _sampling(request),
        "return_logprob": True,
        "stream": stream,
    }
    if request.request_id is not None:
        body["rid"] = request.request_id
    if request.images:
        body["image_data"] = list(request.images)
    return body


def _sampling(request: GenerationRequest) -> dict[str, Any]:
    return {
        "max_new_tokens": new_tokens(request),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        **request.extra,
    }


def segment_of(body: dict[str, Any], engine: str) -> Segment:
    """Return what was generated. Raises `EngineUnavailable` or `GenerationRefused` where nothing was."""
    meta = body.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(meta, dict) or not isinstance(reason, dict):
        raise errors.EngineUnavailable(engine, "the reply has no finish reason")
    return segment(
        engine=engine,
        ids=body.get("output_ids"),
        logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or ()],
        finish_reason=_ending(reason, engine),
        spans=version_spans(meta.get("weight_versions")),
    )


def _ending(reason: dict[str, Any], engine: str, *, begun: bool = False) -> str:
    """Return why a generation ended; an abort with a status is an error. `begun`: tokens of it have come."""
    kind = reason.get("type")
    if kind == "abort" and (code := reason.get("status_code")) is not None:
        words = without_tokens(f"{reason.get('err_type') or 'aborted'} ({code}): {reason.get('message')}")[:300]
        if refuses(int(code)) and not begun:
            raise errors.GenerationRefused(f"{engine} refused a generation request: {words}")
        raise errors.EngineUnavailable(engine, words)
    return kind if kind in {"length", "abort"} else "stop"


def chunk_of(body: dict[str, Any], arrivals: Arrivals) -> Chunk:
    """Return what an event of a stream says: everything so far, or with `--incremental-streaming-output` what is new.

    Raises `EngineUnavailable` or `GenerationRefused`.
    """
    meta = body["meta_info"]
    reason = meta["finish_reason"]
    ids, entries = body["output_ids"] or [], meta.get("output_token_logprobs") or []
    ending = None if reason is None else _ending(reason, arrivals.engine, begun=bool(arrivals.ids))
    seen = len(arrivals.ids)
    total = meta.get("completion_tokens")
    if total is None:
        total = _counted(ids, arrivals.ids, repeats=ending == "abort")
    new = max(0, total - seen)
    # The ids are compared first: that costs a hundredth of comparing the entries, and events grow with the generation.
    goes_on = len(ids) == total and ids[:seen] == arrivals.ids
    if not goes_on and seen <= total <= len(entries) and _named(entries[len(entries) - total :])[:seen] != arrivals.ids:
        raise errors.EngineUnavailable(arrivals.engine, "the stream contradicts what it had sent before")
    spans = version_spans(meta.get("weight_versions"))
    if new > len(ids):
        return Chunk(total=total, finish_reason=ending, spans=spans)
    ids, entries = _aligned(ids, entries[max(0, len(entries) - new) :], new)
    logprobs = tuple(float(entry[0]) for entry in entries)
    return Chunk(ids=tuple(ids), logprobs=logprobs, total=total, finish_reason=ending, spans=spans)


def _counted(ids: list[int], before: list[int], *, repeats: bool) -> int:
    """Return how many tokens there are by now, where an older server does not say."""
    if ids[: len(before)] == before:
        return len(ids)
    if repeats and before[len(before) - len(ids) :] == ids:
        return len(before)
    return len(before) + len(ids)


def _named(entries: list[Any]) -> list[int]:
    return [entry[1] for entry in entries]


def _aligned(ids: list[int], entries: list[Any], new: int) -> tuple[list[int], list[Any]]:
    """Return the `new` tokens and their entries, which name the tokens that they are about.

    An abort in the queue repeats the last token of an incremental stream. Where the server joins it with what came
    before, because the client was slow, the repetition stands behind what is new, and not before it.
    """
    named = _named(entries)
    if ids[len(ids) - new :] == named:
        return named, entries
    return (named, entries) if ids[:new] == named else (ids, entries[:0])
