"""Small pieces that both front ends are built from: bodies, errors, streams, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import JSONResponse, Response, StreamingResponse

from adapters.engines.embedded.checkpoint import token_text
from adapters.engines.embedded.engine import Disconnected, EngineDeadError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from adapters.engines.embedded.engine import Generation
    from adapters.engines.embedded.sequence import Completion

__all__ = ["BadRequestError", "field", "json_object", "typed_json_object"]

T = TypeVar("T")
REQUIRED: Any = object()
CLIENT_CLOSED_REQUEST = 499


class BadRequestError(ValueError):
    """A body or a query that the server refuses with 400.

    Args:
        message: What the answer says.
        param: The field it is about, or `None`.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


async def typed_json_object(request: Request) -> dict[str, Any]:
    """Read a body that must be a JSON object and say so in its content type.

    Raises:
        BadRequestError: If it does not say so, is empty, no JSON or no object.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BadRequestError(f"1 validation error: the content type must be application/json, not {media_type!r}")
    return await json_object(request)


async def json_object(request: Request) -> dict[str, Any]:
    """Read a body that must be a JSON object, whatever its content type says.

    Raises:
        BadRequestError: If it is empty, no JSON or no object.
    """
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise BadRequestError(f"Invalid JSON format: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("1 validation error: the body must be an object")
    return body


def field(body: dict[str, Any], name: str, kind: type[T] | tuple[type[T], ...], default: Any = REQUIRED) -> T:
    """Return a field of a body.

    Args:
        body: The body; fields that nobody asks for are ignored, as the real servers do.
        name: The field.
        kind: The type, or types, that its value must have; an int is a float, a bool is no int.
        default: What stands for a missing field or null; without one the field is required.

    Raises:
        BadRequestError: If it is missing or of another type.
    """
    value = body.get(name)
    if value is None:
        if default is REQUIRED:
            raise BadRequestError(f"1 validation error: field {name!r} is required", param=name)
        return default  # type: ignore[no-any-return]  # the caller's own default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if float in kinds and type(value) is int:
        value = float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise BadRequestError(f"1 validation error: field {name!r} has the wrong type", param=name)
    return value


def choice(name: str, value: str, choices: Iterable[str]) -> str:
    """Return `value` if it is one of `choices`.

    Raises:
        BadRequestError: If it is not.
    """
    if value not in choices:
        raise BadRequestError(
            f"1 validation error: {name} should be one of {', '.join(map(repr, choices))}", param=f"query.{name}"
        )
    return value


def token_ids(prompt: object) -> list[int]:
    """Return the token ids of one prompt: a list of ints, or a text of whole words like "<t5> <t6>".

    Raises:
        BadRequestError: If it is neither.
    """
    if isinstance(prompt, str):
        words = prompt.split()
        if all(word.startswith("<t") and word.endswith(">") and word[2:-1].isdecimal() for word in words):
            return [int(word[2:-1]) for word in words]
        raise BadRequestError("1 validation error: the tokenizer knows only words like '<t5>'")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise BadRequestError("1 validation error: a prompt must be a list of token ids or a text")


def detokenize(tokens: list[int]) -> str:
    """Return the text of `tokens`."""
    return " ".join(map(token_text, tokens))


@asynccontextmanager
async def watching(request: Request) -> AsyncIterator[Callable[[Generation], None]]:
    """Notice within the block when the client goes away.

    Yields:
        A function that says which generations to fail with `Disconnected` then, or at once if it has gone already.
    """
    generations: list[Generation] = []

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for generation in generations:
            generation.fail(Disconnected())

    watcher = asyncio.ensure_future(until_gone())

    def watch(generation: Generation) -> None:
        generations.append(generation)
        if watcher.done():
            generation.fail(Disconnected())

    try:
        yield watch
    finally:
        watcher.cancel()


def event_stream(events: AsyncIterator[str]) -> StreamingResponse:
    """Answer with server-sent events, each of one data line, and `[DONE]` at the end."""

    async def lines() -> AsyncIterator[str]:
        async for event in events:
            yield f"data: {event}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def one_event(data: Any) -> AsyncIterator[str]:
    """Yield one event: an error behind a status of 200, as both servers say it where a stream was asked for."""
    yield json.dumps(data)


async def merged(generations: list[Generation]) -> AsyncIterator[tuple[int, Completion]]:
    """Yield the progress of several generations as it comes, each with its index."""
    if len(generations) == 1:
        async for completion in generations[0].progress():
            yield 0, completion
        return
    queue: asyncio.Queue[tuple[int, Completion | Exception]] = asyncio.Queue()

    async def follow(index: int) -> None:
        try:
            async for completion in generations[index].progress():
                queue.put_nowait((index, completion))
        except (Disconnected, EngineDeadError) as error:
            queue.put_nowait((index, error))

    followers = [asyncio.ensure_future(follow(index)) for index in range(len(generations))]
    left = len(followers)
    try:
        while left:
            index, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            left -= news.finish is not None
            yield index, news
    finally:
        for follower in followers:
            follower.cancel()


def gone() -> Response:
    """Return what is sent to a client that is no longer there."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def openapi(
    title: str, version: str, routes: Iterable[BaseRoute], posted: Mapping[str, Mapping[str, Any]]
) -> JSONResponse:
    """Describe the routes as FastAPI servers do at /openapi.json, as far as a client needs to see what is offered.

    `posted`: what a POST of a path takes, in OpenAPI's words.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        methods = getattr(route, "methods", None) or ()
        path = getattr(route, "path", "")
        paths[path] = {method.lower(): {"responses": {}} for method in sorted(methods) if method != "HEAD"}
        if "post" in paths[path]:
            paths[path]["post"] |= posted.get(path, {})
    return JSONResponse({"openapi": "3.1.0", "info": {"title": title, "version": version}, "paths": paths})
