"""`on_tokens`: every token of a generation is passed on once, in order, and as early as it is known."""

from typing import Any

import anyio
import pytest

from lifecycle import Generation, GenerationRequest, PauseMode
from lifecycle.errors import EngineUnavailable, GenerationInterrupted, GenerationRefused
from lifecycle.generation import Tokens
from lifecycle.ports import Capabilities
from lifecycle.testing import BreakOff, Contradict, LoseTokens, RepeatChunk, ScriptedEngine, Step

from .crowd import until
from .test_generation_streams import STREAMING, Saying, answer, asked, chunk, streaming
from .workbench import Workbench, a_ticket, workbench

pytestmark = pytest.mark.anyio

SILENT = Capabilities(pause_modes=frozenset(PauseMode))


class Listening:
    """A generation under way, and the chunks it passed on."""

    def __init__(self, bench: Workbench, tasks: anyio.abc.TaskGroup, request: GenerationRequest) -> None:
        self.bench = bench
        self.request = request
        self.chunks: list[tuple[int, ...]] = []
        self.logprobs: list[float] = []
        self.result: Generation | None = None
        tasks.start_soon(self._ask)

    async def _ask(self) -> None:
        self.result = await self.bench.segments.generate(self.request, a_ticket(), self.hear)

    def hear(self, tokens: Tokens) -> None:
        """Note what is passed on."""
        self.chunks.append(tokens.ids)
        self.logprobs.extend(tokens.logprobs)


async def _hops(bench: Workbench, request: GenerationRequest) -> tuple[Listening, list[list[tuple[int, ...]]]]:
    """Make 2 tokens, abort, make 1 and 3. Returns what had been passed on after each step."""
    engine = bench.engines["left"]
    heard = []
    async with anyio.create_task_group() as tasks:
        listening = Listening(bench, tasks, request)
        await until(lambda: engine.in_flight == 1)
        engine.produce(2)
        heard.append(list(listening.chunks))
        bench.cohort.generation_held = True
        engine._abort()
        await until(lambda: bench.segments.in_flight == 0)
        bench.cohort.generation_held = False
        bench.segments.changed.give()
        await until(lambda: engine.in_flight == 1)
        heard.append(list(listening.chunks))
        for tokens in (1, 3):
            engine.produce(tokens)
            heard.append(list(listening.chunks))
    return listening, heard


async def test_a_stream_is_passed_on_chunk_by_chunk() -> None:
    """Over an abort, too: what the answer repeats of the stream is not passed on again."""
    listening, heard = await _hops(streaming("left"), asked())
    assert heard == [[(3, 4)], [(3, 4)], [(3, 4), (5,)], [(3, 4), (5,), (6, 7, 8)]]
    assert listening.result is not None
    assert listening.result.output_ids == tuple(token for ids in listening.chunks for token in ids)
    assert listening.result.logprobs == tuple(listening.logprobs)


async def test_without_a_stream_a_segment_is_passed_on_at_a_time() -> None:
    """As early as its tokens are known, and not only when the generation has come to its end."""
    listening, heard = await _hops(streaming("left", capabilities=SILENT), asked())
    assert heard == [[], [(3, 4)], [(3, 4)], [(3, 4)]]
    assert listening.chunks == [(3, 4), (5, 6, 7, 8)]


async def test_tokens_that_only_the_answer_has_are_passed_on_with_it() -> None:
    """An engine may answer more than it streamed."""
    heard: list[tuple[int, ...]] = []
    engine = Saying([chunk(3)], answer(3, 4, 5))
    await workbench(engine).segments.generate(asked(3), a_ticket(), lambda tokens: heard.append(tokens.ids))
    assert heard == [(3,), (4, 5)]


@pytest.mark.parametrize("step", [BreakOff(2), LoseTokens()], ids=["engine dies", "answer loses them"])
async def test_what_was_passed_on_is_never_passed_on_again(step: Step) -> None:
    """The tokens of a stream that broke off are kept, and generation goes on behind them."""
    bench = streaming("left", "right", manual=False)
    bench.engines["left"].on(GenerationRequest, step)
    heard: list[int] = []
    generation = await bench.segments.generate(asked(), a_ticket(), lambda tokens: heard.extend(tokens.ids))
    assert tuple(heard) == generation.output_ids == (3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize("step", [Contradict(), RepeatChunk()])
async def test_tokens_that_an_engine_takes_back_end_a_generation_that_passed_them_on(step: Step) -> None:
    """They cannot be taken back from the caller: it is told, and nothing is asked for again."""
    bench = streaming("left", "right", manual=False)
    bench.engines["left"].on(GenerationRequest, step)
    with pytest.raises(GenerationInterrupted, match="left took back tokens that had been passed on") as interrupted:
        await bench.segments.generate(asked(), a_ticket(), lambda _: None)
    assert isinstance(interrupted.value.__cause__, EngineUnavailable)
    assert (bench.segments.in_flight, bench.engines["right"].in_flight) == (0, 0)


@pytest.mark.parametrize("error", [KeyError("mine"), EngineUnavailable("mine", "mine"), GenerationRefused("mine")])
@pytest.mark.parametrize("capabilities", [STREAMING, SILENT], ids=["stream", "segment"])
async def test_what_it_raises_ends_the_generation(capabilities: Capabilities, error: Exception) -> None:
    """With that very error, whatever its type; the engine sees the connection close, and no other is asked."""
    bench = streaming("left", "right", capabilities=capabilities)
    engine = bench.engines["left"]
    raised: list[Exception] = []
    calls: list[Tokens] = []

    def fail(tokens: Tokens) -> None:
        calls.append(tokens)
        raise error

    async def ask() -> None:
        try:
            await bench.segments.generate(asked(), a_ticket(), fail)
        except Exception as caught:  # noqa: BLE001 - whatever it is, it is looked at
            raised.append(caught)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: engine.in_flight == 1)
        engine.produce(2)
        engine.produce(1)
        engine._abort()
    assert (raised, len(calls)) == ([error], 1)
    assert raised[0] is error
    assert (bench.segments.in_flight, engine.in_flight, bench.engines["right"].in_flight) == (0, 0, 0)


async def test_what_it_raises_comes_before_what_the_engine_says() -> None:
    """An engine that refuses the request in the same moment does not hide the caller's error."""

    class Refusing(Saying):
        async def generate(self, *args: Any, **options: Any) -> Any:
            """Stream a token, then refuse.

            Cancellation: nothing to leave behind.
            """
            options["arrived"](chunk(3))
            raise GenerationRefused("too long")

    def fail(_: Tokens) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await workbench(Refusing([], None)).segments.generate(asked(), a_ticket(), fail)


async def test_tokens_that_are_passed_on_cannot_be_discarded_later() -> None:
    """A request that begins again after an interruption has no tokens to pass on before its end: it is refused."""
    bench = workbench(ScriptedEngine("left"))
    with pytest.raises(ValueError, match="on_tokens needs partial_rollout"):
        await bench.segments.generate(asked(partial_rollout=False), a_ticket(), lambda _: None)
    assert bench.segments.in_flight == 0
