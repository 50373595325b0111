"""vLLM's /v1/completions and /inference/v1/generate: token ids in, token ids out, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import attrs
from starlette.responses import JSONResponse, Response

from adapters.engines.embedded import http
from adapters.engines.embedded.checkpoint import token_text
from adapters.engines.embedded.engine import Disconnected, EngineDeadError
from adapters.engines.embedded.http import BadRequestError, field
from adapters.engines.embedded.sequence import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request

    from adapters.engines.embedded.engine import Engine, Generation
    from adapters.engines.embedded.sequence import Completion
    from adapters.engines.embedded.vllm_manager import AsyncLLM

__all__ = ["DEAD", "CompletionRoutes", "error_body"]

_DEFAULT_MAX_TOKENS = 16
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def error_body(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error answer."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@attrs.frozen(kw_only=True)
class _Job:
    """A parsed body, and how its answers look.

    Args:
        public_id: The id in the answer.
        internal_ids: One per prompt: what aborts go by.
        prompts: Token ids of each prompt.
        copies: Choices per prompt.
        choice: Builds one choice from its index, its prompt, the new part and the whole completion.
        envelope: Builds an answer around choices.
        begin: What each event of a stream begins with.
        silent: Whether a stream leaves out the choice that ends before its first token.
        usage: Whether a stream ends with the number of tokens, and whether every event has it.
    """

    public_id: str
    internal_ids: list[str]
    prompts: list[list[int]]
    params: SamplingParams
    copies: int
    stream: bool
    choice: Callable[[int, list[int], Completion, Completion], dict[str, Any]]
    envelope: Callable[[list[dict[str, Any]], int], dict[str, Any]]
    begin: dict[str, Any]
    silent: bool
    usage: tuple[bool, bool]


class CompletionRoutes:
    """Answer the two generation routes.

    Args:
        llm: Where requests go.
        model: The name that requests must use, if they name a model.
    """

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._llm, self._model = llm, model
        self._engine: Engine = llm.engine

    async def completions(self, request: Request) -> Response:
        """Answer /v1/completions."""
        body = await http.typed_json_object(request)
        given: Any = body.get("prompt")
        many = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts = [http.token_ids(one) for one in (given if many else [given])]
        request_id = f"cmpl-{request.headers.get('x-request-id') or uuid.uuid4().hex}"
        logprobs = body.get("logprobs") is not None
        token_ids = field(body, "return_token_ids", bool, False)
        begin = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": self._model}
        job = self._job(
            body,
            prompts,
            body,
            public_id=request_id,
            internal_ids=[f"{request_id}-{index}" for index in range(len(prompts))],
            choice=lambda index, prompt, new, whole: _completion_choice(
                index, prompt, new, whole, logprobs=logprobs, token_ids=token_ids
            ),
            envelope=lambda choices, generated: {
                **begin,
                "choices": [{**choice, "prompt_logprobs": None} for choice in choices],
                "usage": {**_usage(sum(map(len, prompts)), generated), "prompt_tokens_details": None},
            },
            begin=begin,
            silent=True,
        )
        return await self._respond(request, body, job)

    async def generate(self, request: Request) -> Response:
        """Answer /inference/v1/generate."""
        body = await http.typed_json_object(request)
        given = field(body, "sampling_params", dict)
        given_id = request.headers.get("x-request-id") or field(body, "request_id", str, None)
        request_id = f"generate-tokens-{given_id or uuid.uuid4().hex}"
        logprobs = given.get("logprobs") is not None
        job = self._job(
            body,
            [http.token_ids(field(body, "token_ids", list))],
            given,
            public_id=request_id,
            internal_ids=[request_id],
            choice=lambda index, _, new, whole: _generate_choice(index, new, whole, logprobs=logprobs),
            envelope=lambda choices, _: {
                "request_id": request_id,
                "choices": choices,
                "prompt_logprobs": None,
                "kv_transfer_params": None,
            },
            begin={"request_id": request_id, "output_mode": "tokens"},
            silent=False,
        )
        return await self._respond(request, body, job)

    def _job(
        self,
        body: dict[str, Any],
        prompts: list[list[int]],
        params: dict[str, Any],
        *,
        public_id: str,
        internal_ids: list[str],
        choice: Callable[[int, list[int], Completion, Completion], dict[str, Any]],
        envelope: Callable[[list[dict[str, Any]], int], dict[str, Any]],
        begin: dict[str, Any],
        silent: bool,
    ) -> _Job:
        wanted = field(params, "max_tokens", int, _DEFAULT_MAX_TOKENS)
        stream = field(body, "stream", bool, False)
        for prompt in prompts:
            if not stream or self._engine.stray(prompt) is None:
                self._check(prompt, wanted)
        options = field(body, "stream_options", dict, {})
        usage = field(options, "include_usage", bool, False)
        return _Job(
            public_id=public_id,
            internal_ids=internal_ids,
            prompts=prompts,
            params=_sampling_params(params, wanted),
            copies=field(params, "n", int, 1),
            stream=stream,
            choice=choice,
            envelope=envelope,
            begin=begin,
            silent=silent,
            usage=(usage, usage and field(options, "continuous_usage_stats", bool, False)),
        )

    def _check(self, prompt: list[int], wanted: int) -> None:
        problem = self._engine.problem_with(prompt)
        if problem is not None:
            raise BadRequestError(problem)
        if len(prompt) + wanted > self._engine.max_context:
            raise BadRequestError(
                f"This model's maximum context length is {self._engine.max_context} tokens. However, you requested "
                f"{wanted} output tokens and your prompt contains {len(prompt)} input tokens."
            )

    async def _respond(self, request: Request, body: dict[str, Any], job: _Job) -> Response:
        if body.get("model") not in (None, self._model):
            message = f"The model `{body['model']}` does not exist."
            return JSONResponse(error_body(message, "NotFoundError", 404, "model"), status_code=404)
        if job.stream:
            strays = (self._engine.stray(prompt) for prompt in job.prompts)
            if (stray := next((token for token in strays if token is not None), None)) is not None:
                said = error_body(f"Token id {stray} is out of vocabulary", "BadRequestError", 400)
                return http.event_stream(http.one_event(said))
            return http.event_stream(self._stream(request, job))
        async with http.watching(request) as watch:
            generations = self._submit(job, stream=False)
            for generation in generations:
                watch(generation)
            try:
                completions = await asyncio.gather(*(generation.completion() for generation in generations))
            except Disconnected:
                return http.gone()
            finally:
                self._leave(generations)
        for completion in completions:
            _raise_if_dead(completion)
        choices = [
            job.choice(index, generation.sequence.prompt, completion, completion)
            for index, (generation, completion) in enumerate(zip(generations, completions, strict=True))
        ]
        return JSONResponse(job.envelope(choices, sum(len(completion.tokens) for completion in completions)))

    def _submit(self, job: _Job, *, stream: bool) -> list[Generation]:
        self._llm.server_load += 1
        return [
            self._llm.submit(internal_id, prompt, _vary(job.params, copy), stream=stream)
            for internal_id, prompt in zip(job.internal_ids, job.prompts, strict=True)
            for copy in range(job.copies)
        ]

    def _leave(self, generations: list[Generation]) -> None:
        self._llm.server_load -= 1
        self._llm.leave(generations)

    async def _stream(self, request: Request, job: _Job) -> AsyncIterator[str]:
        async with http.watching(request) as watch:
            generations = self._submit(job, stream=True)
            for generation in generations:
                watch(generation)
            sent = [0] * len(generations)
            final, continuous = job.usage
            try:
                async for index, whole in http.merged(generations):
                    _raise_if_dead(whole)
                    if job.silent and not whole.tokens:
                        continue
                    prompt, before = generations[index].sequence.prompt, sent[index]
                    new = attrs.evolve(whole, tokens=whole.tokens[before:], logprobs=whole.logprobs[before:])
                    sent[index] = len(whole.tokens)
                    choice = job.choice(index, [] if before else prompt, new, whole)
                    yield json.dumps(_stream_event(job, [choice], len(prompt), sent[index] if continuous else None))
                if final:
                    yield json.dumps(_stream_event(job, [], sum(map(len, job.prompts)), sum(sent)))
            except Disconnected:
                return
            except EngineDeadError:
                yield json.dumps(error_body(DEAD, "InternalServerError", 500))
            finally:
                self._leave(generations)


def _raise_if_dead(completion: Completion) -> None:
    if completion.finish is not None and completion.finish.reason == "error":
        raise EngineDeadError(DEAD)


def _vary(params: SamplingParams, copy: int) -> SamplingParams:
    """Give each of several choices its own seed, or all would be the same."""
    return params if params.seed is None or copy == 0 else attrs.evolve(params, seed=params.seed + copy)


def _sampling_params(given: dict[str, Any], max_tokens: int) -> SamplingParams:
    params = SamplingParams(
        max_new_tokens=max_tokens,
        temperature=field(given, "temperature", float, 1.0),
        top_p=field(given, "top_p", float, 1.0),
        top_k=field(given, "top_k", int, 0),
        stop_token_ids=frozenset(field(given, "stop_token_ids", list, [])),
        ignore_eos=field(given, "ignore_eos", bool, False),
        seed=field(given, "seed", int, None),
    )
    if max_tokens < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    if params.temperature < 0:
        raise BadRequestError(f"temperature must be non-negative, got {params.temperature}.", param="temperature")
    if not 0 < params.top_p <= 1:
        raise BadRequestError(f"top_p must be in (0, 1], got {params.top_p}.", param="top_p")
    return params


def _usage(asked: int, generated: int) -> dict[str, Any]:
    return {"prompt_tokens": asked, "total_tokens": asked + generated, "completion_tokens": generated}


def _stream_event(job: _Job, choices: list[dict[str, Any]], asked: int, generated: int | None) -> dict[str, Any]:
    usage = {"usage": None if generated is None else _usage(asked, generated)}
    return {**job.begin, "choices": choices, **({} if job.silent and generated is None else usage)}


def _reasons(whole: Completion) -> dict[str, Any]:
    finish = whole.finish
    return {
        "finish_reason": None if finish is None else finish.reason,
        "stop_reason": None if finish is None else finish.matched,
    }


def _completion_choice(
    index: int, prompt: list[int], new: Completion, whole: Completion, *, logprobs: bool, token_ids: bool
) -> dict[str, Any]:
    words = [token_text(token) for token in new.tokens]
    choice: dict[str, Any] = {"index": index, "text": " ".join(words), "logprobs": None, **_reasons(whole)}
    if logprobs:
        # Only the chosen token is listed among the most probable ones.
        top = [{word: logprob} for word, logprob in zip(words, new.logprobs, strict=True)]
        offsets = [sum(len(word) + 1 for word in words[:at]) for at in range(len(words))]
        choice["logprobs"] = {
            "text_offset": offsets,
            "token_logprobs": new.logprobs,
            "tokens": words,
            "top_logprobs": top,
        }
    choice["token_ids"] = new.tokens if token_ids else None
    # Of a stream only the first event has them.
    choice["prompt_token_ids"] = prompt if token_ids and prompt else None
    return choice


def _generate_choice(index: int, new: Completion, whole: Completion, *, logprobs: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None, **_reasons(whole), "token_ids": new.tokens}
    if logprobs:
        pairs = zip(new.tokens, new.logprobs, strict=True)
        choice["logprobs"] = {
            "content": [
                # The rank of a token is not kept here.
                {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
                for token, logprob in pairs
            ]
        }
    choice["weight_versions"] = None if whole.finish is None else [attrs.asdict(span) for span in whole.spans]
    return choice
