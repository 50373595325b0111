"""Generation as SGLang's `/generate` takes and answers it: token ids both ways."""

from typing import Any

from lifecycle import errors
from lifecycle.generation import GenerationRequest, Segment

from .dialect import new_tokens, segment, version_spans


def generate_body(request: GenerationRequest) -> dict[str, Any]:
    """Return the body for `/generate`."""
    body: dict[str, Any] = {
        "input_ids": list(request.input_ids),
        "sampling_params": _sampling(request),
        "return_logprob": True,
        "stream": False,
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
    kind = reason.get("type")
    if kind == "abort" and (code := reason.get("status_code")) is not None:
        words = f"{reason.get('err_type') or 'aborted'} ({code}): {str(reason.get('message'))[:200]}"
        if 400 <= int(code) < 500:
            raise errors.GenerationRefused(f"{engine} refused a generation request: {words}")
        raise errors.EngineUnavailable(engine, words)
    return segment(
        engine=engine,
        ids=body.get("output_ids"),
        logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or ()],
        finish_reason=kind if kind in {"length", "abort"} else "stop",
        spans=version_spans(meta.get("weight_versions")),
    )
