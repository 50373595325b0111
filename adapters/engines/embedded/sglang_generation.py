"""SGLang's /generate: one prompt or many, whole answers or streams."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import attrs
from starlette.responses import JSONResponse, Response

from adapters.engines.embedded import http
from adapters.engines.embedded.engine import Disconnected
from adapters.engines.embedded.http import BadRequestError, field
from adapters.engines.embedded.sequence import Finish, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from adapters.engines.embedded.engine import Engine, Generation
    from adapters.engines.embedded.sequence import Completion
    from adapters.engines.embedded.sglang_manager import TokenizerManager

__all__ = ["GenerateRoute"]

_DEFAULT_MAX_NEW_TOKENS = 128


@attrs.frozen(kw_only=True)
class _Prompt:
    request_id: str
    tokens: list[int]
    params: SamplingParams


@attrs.frozen(kw_only=True)
class _Job:
    """A parsed body."""

    prompts: list[_Prompt]
    many: bool
    stream: bool
    logprobs: bool


class _RefusedError(BadRequestError):
    """A request that is well-formed and makes no sense."""


class GenerateRoute:
    """Answer /generate.

    Args:
        manager: The gate and the lock that generations go through.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._engine: Engine = manager.engine

    async def __call__(self, request: Request) -> Response:
        """Run the request to its end, or as a stream."""
        body = await http.typed_json_object(request)
        try:
            job = _parse(body, self._engine)
        except _RefusedError as error:
            if not body.get("stream"):
                raise
            said = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
            return http.event_stream(http.one_event({"error": said}))
        if job.stream:
            return http.event_stream(self._stream(request, job))
        async with http.watching(request) as watch, self._manager.generating():
            generations = [self._submit(prompt, stream=False) for prompt in job.prompts]
            for generation in generations:
                watch(generation)
            try:
                completions = await asyncio.gather(*(generation.completion() for generation in generations))
            except Disconnected:
                return http.gone()
            finally:
                self._leave(generations)
        answers = [
            self._answer(generation, completion, job)
            for generation, completion in zip(generations, completions, strict=True)
        ]
        return JSONResponse(answers if job.many else answers[0])

    async def generate_one(self) -> None:
        """Make one token, through the gate: what the health check asks for."""
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        async with self._manager.generating():
            generation = self._submit(_Prompt(request_id="HEALTH_CHECK", tokens=[0], params=params), stream=False)
            try:
                await generation.completion()
            finally:
                self._leave([generation])

    def _submit(self, prompt: _Prompt, *, stream: bool) -> Generation:
        return self._engine.submit(prompt.request_id, prompt.tokens, prompt.params, stream=stream)

    def _leave(self, generations: list[Generation]) -> None:
        for generation in generations:
            self._engine.forget(generation)
        unfinished = {g.sequence for g in generations if g.sequence.finish is None}
        if unfinished:
            self._manager.abort(unfinished.__contains__)

    async def _stream(self, request: Request, job: _Job) -> AsyncIterator[str]:
        async with http.watching(request) as watch, self._manager.generating():
            generations = [self._submit(prompt, stream=True) for prompt in job.prompts]
            for generation in generations:
                watch(generation)
            sent = [0] * len(generations)
            try:
                async for index, completion in http.merged(generations):
                    answer = self._event(generations[index], completion, job, sent[index])
                    sent[index] = len(completion.tokens)
                    yield json.dumps({**answer, "index": index} if job.many else answer)
            except Disconnected:
                return
            finally:
                self._leave(generations)

    def _event(self, generation: Generation, completion: Completion, job: _Job, sent: int) -> dict[str, Any]:
        """Say what there is so far, or what is new since `sent` tokens, which is what an engine's options decide."""
        answer = self._answer(generation, completion, job)
        meta = answer["meta_info"]
        if sent and "response_sent_to_client_ts" in meta:
            del meta["response_sent_to_client_ts"]
        if not self._engine.options.incremental_streaming_output:
            return answer
        if _in_queue(completion.finish):
            # The last token once more, beside the whole text and every log-probability.
            return {**answer, "output_ids": completion.tokens[-1:]}
        new = completion.tokens[sent:]
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs"] = meta["output_token_logprobs"][sent:]
        return {**answer, "text": http.detokenize(new), "output_ids": new}

    def _answer(self, generation: Generation, completion: Completion, job: _Job) -> dict[str, Any]:
        sequence, finish = generation.sequence, completion.finish
        queued = _in_queue(finish)
        # Where no stream had brought its tokens to the front end, a request that is aborted in the queue loses them.
        lost = queued and not job.stream
        tokens, logprobs = ([], []) if lost else (completion.tokens, completion.logprobs)
        spans = [attrs.evolve(span, end=0) for span in completion.spans[:1]] if lost else completion.spans
        versions = [attrs.asdict(span) for span in spans]
        meta: dict[str, Any] = {
            "id": sequence.request_id,
            "finish_reason": _finish_reason(finish, len(completion.tokens)),
            "weight_version": versions[-1]["version"] if versions else self._manager.version,
        }
        if not queued:
            meta |= {
                "prompt_tokens": len(sequence.prompt),
                "num_retractions": sequence.retractions,
                "cached_tokens": sequence.cached_tokens,
                "reasoning_tokens": 0,
                "cached_tokens_details": None,
                "dp_rank": None,
            }
        if job.logprobs:
            meta |= {
                "input_token_logprobs": [],
                "output_token_logprobs": [
                    [logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)
                ],
                "output_token_logprobs_length": len(tokens),
            }
        meta |= {"completion_tokens": len(tokens), "response_sent_to_client_ts": time.time()}
        if finish is not None:
            meta |= {"weight_versions": versions, "e2e_latency": time.monotonic() - sequence.created}
        shown = tokens[:-1] if finish is not None and finish.reason == "stop" else tokens
        return {"text": http.detokenize(shown), "output_ids": tokens, "meta_info": meta}


def _in_queue(finish: Finish | None) -> bool:
    return finish is not None and finish.message == "Abort in waiting queue"


def _finish_reason(finish: Finish | None, length: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.reason == "length":
        return {"type": "length", "length": length}
    if finish.reason == "stop":
        return {"type": "stop", "matched": finish.matched}
    said = {"type": finish.reason, "message": finish.message}
    return said if _in_queue(finish) else {**said, "status_code": None, "err_type": None}


def _parse(body: dict[str, Any], engine: Engine) -> _Job:
    given: Any = body.get("input_ids")
    if given is None:
        given = body.get("text")
    many = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts = [http.token_ids(one) for one in (given if many else [given])]
    params = body.get("sampling_params") or {}
    each = params if isinstance(params, list) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise BadRequestError(f"{len(each)} sampling_params do not match {len(prompts)} prompts.")
    copies = [_copies(one) for one in each]
    ids = iter(_request_ids(body.get("rid"), sum(copies)))
    try:
        params_of = [_sampling_params(one, prompt, engine) for prompt, one in zip(prompts, each, strict=True)]
    except BadRequestError as error:
        raise _RefusedError(str(error)) from None
    expanded = [
        _Prompt(request_id=next(ids), tokens=prompt, params=one)
        for prompt, one, count in zip(prompts, params_of, copies, strict=True)
        for _ in range(count)
    ]
    return _Job(
        prompts=expanded,
        many=many or len(expanded) > 1,
        stream=field(body, "stream", bool, False),
        logprobs=bool(body.get("return_logprob") or False),
    )


def _copies(params: object) -> int:
    if not isinstance(params, dict):
        raise BadRequestError("1 validation error: field 'sampling_params' has the wrong type")
    return field(params, "n", int, 1)


def _request_ids(rid: object, count: int) -> list[str]:
    if isinstance(rid, list) and len(rid) == count and all(isinstance(one, str) for one in rid):
        return rid
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]
    if rid is not None:
        raise BadRequestError("1 validation error: field 'rid' has the wrong type")
    return [uuid.uuid4().hex for _ in range(count)]


def _sampling_params(given: dict[str, Any], prompt: list[int], engine: Engine) -> SamplingParams:
    problem = engine.problem_with(prompt)
    if problem is not None:
        raise BadRequestError(problem)
    params = SamplingParams(
        max_new_tokens=field(given, "max_new_tokens", int, _DEFAULT_MAX_NEW_TOKENS),
        temperature=field(given, "temperature", float, 1.0),
        top_p=field(given, "top_p", float, 1.0),
        top_k=field(given, "top_k", int, -1),
        stop_token_ids=frozenset(field(given, "stop_token_ids", list, [])),
        ignore_eos=field(given, "ignore_eos", bool, False),
        seed=field(given, "sampling_seed", int, None),
    )
    if params.temperature < 0:
        raise BadRequestError(f"temperature must be non-negative, got {params.temperature}.")
    if not 0 < params.top_p <= 1:
        raise BadRequestError(f"top_p must be in (0, 1], got {params.top_p}.")
    if params.top_k < -1 or params.top_k == 0:
        raise BadRequestError(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
    wanted = params.max_new_tokens or 0
    if wanted < 1:
        raise BadRequestError(f"max_new_tokens must be at least 1, got {wanted}.")
    if len(prompt) + wanted > engine.max_context:
        raise BadRequestError(
            f"Requested token count exceeds the model's maximum context length of {engine.max_context} tokens. "
            f"You requested a total of {len(prompt) + wanted} tokens."
        )
    return params
