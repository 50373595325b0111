"""The engines that the demo trains against: its own, each in a process started here, or servers attached to by URL."""

import json
import socket
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from ipaddress import ip_address
from pathlib import Path

import anyio
import httpx

from adapters.engines import EmbeddedEngine, HttpEngine
from adapters.frontends.examination import SPEAKS
from lifecycle import GenerationRequest, Lifecycle, Standing, errors

from . import task

_PROMPT = (0, 1, 2, 3, task.SEPARATOR)
"""Not a single token: vLLM 0.32.0 on CPU dies of that where it is the first that is asked of it."""
_TOKENS_LOOKED_AT = 32
_SECONDS_TO_GENERATE = 60.0


class Unsuitable(RuntimeError):
    """An engine that was given by URL cannot be trained against; its weights are as they were."""


async def start(
    stack: AsyncExitStack, count: int, *, dialect: str, model: Path, out: Path, died: list[str]
) -> list[HttpEngine]:
    """Start embedded engines side by side, each in a process of its own, and write down in `out` which those are.

    When `stack` unwinds they are ended; `died` gets the names of those whose process has ended before.

    Cancellation: `stack` ends those that have been started.
    """
    engines = [EmbeddedEngine(model=model, dialect=dialect, name=f"engine-{i}") for i in range(count)]
    async with anyio.create_task_group() as tasks:
        for engine in engines:
            stack.push_async_exit(engine)  # before it starts: it is ended whatever becomes of the others
            tasks.start_soon(engine.__aenter__)
    write_processes(out, engines)
    stack.callback(lambda: died.extend(engine.engine.name for engine in engines if not engine.running))
    return [engine.engine for engine in engines]


def write_processes(out: Path, engines: Sequence[EmbeddedEngine]) -> None:
    """Write down which processes are the demo's own."""
    processes = [{"name": engine.engine.name, "pid": engine.pid, "url": engine.url} for engine in engines]
    (out / "engines.json").write_text(json.dumps(processes, indent=2) + "\n", encoding="utf-8")


def at(urls: Iterable[str], *, dialect: str) -> list[HttpEngine]:
    """Return the engines at `urls`; nothing is sent.

    Raises `ValueError` for a URL that makes no sense, or that comes twice.
    """
    engines = [SPEAKS[dialect](url) for url in urls]
    names = [engine.name for engine in engines]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--engine names {', '.join(twice)} more than once")
    return engines


def own_address(urls: Iterable[str]) -> str:
    """Return the address under which engines reach this machine: the one it has on the way to a remote one, if any."""
    addresses = []
    for url in urls:
        # A host that is not found has its say when it is attached to.
        with suppress(OSError):
            family, kind, *_, target = socket.getaddrinfo(httpx.URL(url).host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # which sends nothing: it only asks for the route
                addresses.append(str(probe.getsockname()[0]))
    return next((address for address in addresses if not ip_address(address).is_loopback), "127.0.0.1")


async def attach(stack: AsyncExitStack, lifecycle: Lifecycle, engines: Sequence[HttpEngine], *, dialect: str) -> None:
    """Attach `lifecycle` to engines that were not started here, and look at each before anything is written to it.

    Raises `Unsuitable` for one that does not answer in this dialect, that somebody else has paused, or that serves
    another model: an update would leave that one with neither model, or kill it.

    Cancellation: `stack` closes the lifecycle.
    """
    try:
        await stack.enter_async_context(lifecycle)
    except errors.AttachFailed as failed:
        raise Unsuitable("; ".join(_told(cause, dialect) for cause in failed.exceptions)) from failed
    for view in lifecycle.engines:
        if view.standing is Standing.LOST:
            raise Unsuitable(f"{view.name} does not answer as {dialect}: {view.reason}")
        if view.dirty:
            raise Unsuitable(f"{view.name} is paused, perhaps by a trainer at work; if there is none, restart it")
    for engine in engines:
        await _expect_demo_model(engine)


def _told(cause: Exception, dialect: str) -> str:
    if isinstance(cause, errors.EngineFailure):
        return f"{cause.engine} does not answer as {dialect}: {cause.detail}"
    return str(cause)


async def _expect_demo_model(engine: HttpEngine) -> None:
    """Let the engine make tokens at a temperature at which any model shows how large its vocabulary is.

    No route of both servers tells it.
    """
    request = GenerationRequest(input_ids=_PROMPT, max_new_tokens=_TOKENS_LOOKED_AT, temperature=2.0, ignore_eos=True)
    try:
        segment = await engine.generate(request, timeout=_SECONDS_TO_GENERATE)
    except errors.LifecycleError as error:
        raise Unsuitable(str(error)) from error
    if (largest := max(segment.output_ids, default=0)) >= task.VOCABULARY:
        raise Unsuitable(
            f"{engine.name} serves another model: it generated token {largest}, and the demo's tokens end at "
            f"{task.VOCABULARY - 1}; start it from what `rollout-lifecycle demo-model` writes"
        )
