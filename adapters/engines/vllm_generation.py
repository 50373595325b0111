"""Generation as vLLM's two routes take and answer it: by tokens, and as a completion."""

from typing import Any

from lifecycle import errors
from lifecycle.generation import GenerationRequest, Segment

from .dialect import new_tokens, segment, version_spans


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


def tokens_body(request: GenerationRequest) -> dict[str, Any]:
    """Return the body for `/inference/v1/generate`."""
    body = {"token_ids": list(request.input_ids), "sampling_params": _sampling(request), "stream": False}
    return body if request.request_id is None else {**body, "request_id": request.request_id}


def completion_body(request: GenerationRequest) -> dict[str, Any]:
    """Return the body for `/v1/completions`."""
    body = {"prompt": list(request.input_ids), "stream": False, "return_token_ids": True, **_sampling(request)}
    return body if request.request_id is None else {**body, "request_id": request.request_id}


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
