"""Generation as vLLM's two routes take and answer it: by tokens, and as a completion."""

from typing import Any

from lifecycle import errors
from lifecycle.generation import GenerationRequest, Segment

from .generation import new_tokens, out_of_step, segment, version_spans
from .streaming import Arrivals, Chunk


def _sampling(request: GenerationRequest) -> dict[str, Any]:
    return {
        "max_tokens": new_tokens(request),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": max(0, request.top_k),
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        # 0: of the sampled token, and of no others.
        "logprobs": 0,
        **request.extra,
    }


def tokens_body(request: GenerationRequest, *, stream: bool = False) -> dict[str, Any]:
    """Return the body for `/inference/v1/generate`."""
    body = {"token_ids": list(request.input_ids), "sampling_params": _sampling(request)}
    return body | _how(request, stream=stream)


def completion_body(request: GenerationRequest, *, stream: bool = False) -> dict[str, Any]:
    """Return the body for `/v1/completions`."""
    body = {"prompt": list(request.input_ids), "return_token_ids": True, **_sampling(request)}
    return body | _how(request, stream=stream)


def _how(request: GenerationRequest, *, stream: bool) -> dict[str, Any]:
    how: dict[str, Any] = {"stream": stream}
    if stream:
        # With each event the number of tokens so far: only that tells whether one got lost.
        how["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if request.request_id is not None:
        how["request_id"] = request.request_id
    return how


def segment_of(body: dict[str, Any], engine: str) -> Segment:
    """Return what either route generated. Raises `EngineUnavailable` for a body that is no generation."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise errors.EngineUnavailable(engine, "the reply has no choice")
    choice = choices[0]
    reason = choice.get("finish_reason")
    if reason == "error":
        raise errors.EngineUnavailable(engine, "the generation ended with an error")
    return segment(
        engine=engine,
        ids=choice.get("token_ids"),
        logprobs=_logprobs(choice.get("logprobs")),
        finish_reason=reason if reason in {"length", "abort"} else "stop",
        spans=version_spans(choice.get("weight_versions")),
    )


def _logprobs(logprobs: Any) -> list[Any]:
    """Return one log-probability a token, from either route's shape."""
    if not isinstance(logprobs, dict):
        return []
    if "token_logprobs" in logprobs:
        return list(logprobs["token_logprobs"] or ())
    return [entry.get("logprob") for entry in logprobs.get("content") or ()]


def chunk_of(body: dict[str, Any], arrivals: Arrivals) -> Chunk:
    """Return what an event of either route's stream says: what is new. Raises `EngineUnavailable`."""
    total = (body.get("usage") or {}).get("completion_tokens")
    if not body["choices"]:  # only the number of tokens, at the end
        return Chunk(total=total)
    choice = body["choices"][0]
    reason = choice.get("finish_reason")
    if reason == "error":
        raise errors.EngineUnavailable(arrivals.engine, "the generation ended with an error")
    ids = choice.get("token_ids") or ()
    logprobs = _logprobs(choice.get("logprobs"))
    if None in logprobs:
        raise out_of_step(arrivals.engine, len(ids), len(logprobs) - logprobs.count(None))
    named = [entry["token_id"] for entry in (choice.get("logprobs") or {}).get("content") or () if "token_id" in entry]
    if named and named != list(ids):
        raise out_of_step(arrivals.engine, len(ids), 0)
    spans = version_spans(choice.get("weight_versions"))
    return Chunk(
        ids=tuple(ids),
        logprobs=tuple(map(float, logprobs)),
        total=spans[-1].end if total is None and spans else total,
        finish_reason=reason,
        spans=spans,
    )
