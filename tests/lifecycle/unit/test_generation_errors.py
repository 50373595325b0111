"""Errors of a generation never contain its prompt, whatever a server or a port says."""

import json
import pickle
import traceback
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import GenerationRequest
from lifecycle.errors import EngineUnavailable, GenerationInterrupted, GenerationRefused, LifecycleError
from lifecycle.generation import without_prompt
from tests.strategies import QUICK

from .test_segment_failures import Answering, hurried
from .workbench import a_ticket, workbench

PROMPT = (90210, 31337, 40404, 7)
TEXT = "My diary: nobody must know that I planted the roses."
IMAGE = "data:image/png;base64," + "QUJD" * 30
STOP = "</secret>"

ECHOES: dict[str, Callable[[tuple[int, ...]], str]] = {
    "JSON": lambda ids: json.dumps({"input_ids": list(ids)}, separators=(",", ":")),
    "indented JSON": lambda ids: json.dumps({"input_ids": list(ids)}, indent=2),
    "quoted JSON": lambda ids: json.dumps({"message": json.dumps([list(ids)], indent=1)}),
    "list": lambda ids: f"got {list(ids)}",
    "tuple": lambda ids: f"got {ids!r}",
    "tensor": lambda ids: f"tensor({list(ids)}, dtype=torch.int64)",
    "array": lambda ids: f"array: [{' '.join(map(str, ids))}]",
    "comma joined": lambda ids: f"tokens {','.join(map(str, ids))}!",
    "words": lambda ids: f"tokens {' '.join(map(str, ids))}!",
    "strings": lambda ids: json.dumps([str(token) for token in ids]),
    "cut off": lambda ids: f"got {list(ids)}"[:-3],
}


def _request(ids: tuple[int, ...] = PROMPT) -> GenerationRequest:
    return GenerationRequest(
        input_ids=ids, max_new_tokens=4, retry_budget=2, stop=(STOP,), images=(IMAGE,), extra={"regex": ["[a-z]{9}"]}
    )


def _tells(said: str, ids: tuple[int, ...] = PROMPT) -> list[str]:
    secrets = [*(str(token) for token in ids if token > 999), TEXT[10:20], STOP, IMAGE[:30], "[a-z]{9}"]
    return [secret for secret in secrets if secret in said]


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
def test_token_ids_are_taken_out_in_any_notation(echo: Callable[[tuple[int, ...]], str]) -> None:
    """Three and more in a row go, however they are separated; what is said around them stays."""
    said = without_prompt(f"HTTP 400: {echo(PROMPT)} is too long", _request())
    assert _tells(said) == []
    assert (said.startswith("HTTP 400: "), said.endswith(" is too long")) == (True, True)


@pytest.mark.parametrize("ids", [(90210,), (90210, 31337)], ids=["one", "two"])
@pytest.mark.parametrize("notation", ["JSON", "indented JSON", "quoted JSON", "list", "tuple", "tensor", "array"])
def test_a_short_prompt_is_taken_out_where_it_is_a_list(notation: str, ids: tuple[int, ...]) -> None:
    """One or two numbers might be anything, unless they are written as a list."""
    assert _tells(without_prompt(f"HTTP 400: {ECHOES[notation](ids)}", _request(ids)), ids) == []


@pytest.mark.parametrize(
    "said",
    [
        f"cannot decode {TEXT!r} at all",
        f'{{"prompt": "{TEXT}", "n": 1}}',
        f"input_value='{TEXT}', input_type=str",
        f'{{"message":"refused","text":"{TEXT}',
        f"{{'prompt': ['{TEXT}']}}",
        f"stops at {STOP} always",
        f"stops at {json.dumps(STOP)}",
        f"no image: {IMAGE}",
        f"no image: {IMAGE[:80]}",
        "bad regex [a-z]{9}",
        f"{'x' * 40} stops at {STOP[:-2]}",
    ],
)
def test_text_and_images_are_taken_out(said: str) -> None:
    """What the request holds wherever it stands, and what looks like the text of a prompt."""
    assert "[...]" in without_prompt(said, _request())
    assert _tells(without_prompt(said, _request())) == []
    assert STOP[:-2] not in without_prompt(said, _request())


@pytest.mark.parametrize(
    "said",
    [
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "[Errno 111] Connection refused",
        "connect to 10.20.30.40:8000 failed after 3 attempts, 0.5 s",
        '{"object":"error","message":"max_new_tokens must be at most 2048, got 4096","code":400}',
        '{"detail": "the model does not exist here, is it loaded?"}',
        "can't reach the engine, it doesn't answer and hasn't answered for 30 s",
        "2 validation errors: temperature, top_p",
    ],
)
def test_what_helps_is_left(said: str) -> None:
    """Numbers, addresses and messages that are not the request's stay as they were said."""
    assert without_prompt(said, _request()) == said


def test_what_is_said_is_bounded() -> None:
    """A page of HTML is no message."""
    assert len(without_prompt("so it is " * 10_000, _request())) == 500


@QUICK
@given(
    st.text(max_size=3000), st.lists(st.integers(1000, 10**6), min_size=3, max_size=30), st.sampled_from(list(ECHOES))
)
def test_no_text_around_it_hides_token_ids(around: str, ids: list[int], notation: str) -> None:
    """Whatever a server says before and after: its answer is bounded, and the ids are not in it."""
    said = without_prompt(f"{around[:60]} {ECHOES[notation](tuple(ids))} {around}", _request(tuple(ids)))
    kept = {str(token) for token in ids if str(token) not in around}
    assert len(said) <= 500
    assert len([token for token in kept if token in said]) <= 2


class Picky(EngineUnavailable):
    """An error of a port of one's own."""

    def __init__(self, engine: str, detail: str, *, hint: str) -> None:
        super().__init__(engine, detail)
        self.hint = hint


def _failing(error: LifecycleError) -> Exception:
    """Return the error as a port leaves it that has caught another one, and told more about it."""
    error.add_note(f"sent {list(PROMPT)}")
    try:
        try:
            raise ValueError(f"cannot send {list(PROMPT)}")
        except ValueError as cause:
            raise error from cause
    except LifecycleError as raised:
        return raised


@pytest.mark.anyio
@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
async def test_a_refusal_that_echoes_the_prompt_is_cleaned(echo: Callable[[tuple[int, ...]], str]) -> None:
    """It keeps its type and what is said beside; neither its text nor its causes nor its notes have the prompt."""
    bench = workbench(Answering("left", _failing(GenerationRefused(f"too long: {echo(PROMPT)}"))))
    with pytest.raises(GenerationRefused, match="too long") as refused:
        await bench.segments.generate(_request(), a_ticket())
    assert type(refused.value) is GenerationRefused
    assert (refused.value.__cause__, refused.value.__context__) == (None, None)
    assert _tells("".join(traceback.format_exception(refused.value))) == []
    assert _tells(repr(pickle.loads(pickle.dumps(refused.value)).__dict__)) == []  # noqa: S301 - our own bytes


@pytest.mark.anyio
async def test_an_engine_that_echoes_the_prompt_when_it_fails_is_cleaned() -> None:
    """The cause of giving up keeps its type, engine, detail and facts of its own, all without the prompt."""
    error = Picky("left", f"500: {list(PROMPT)}", hint=f"prompt='{TEXT}'")
    bench = workbench(Answering("left", _failing(error), for_ever=True))
    with pytest.raises(GenerationInterrupted) as given_up:
        await hurried(bench, _request())
    cause = given_up.value.__cause__
    assert isinstance(cause, Picky)
    assert (cause.engine, cause.detail, cause.hint) == ("left", "500: [...]", "prompt=[...]")
    assert (cause.__cause__, cause.__context__) == (None, None)
    assert str(cause) == "left did not answer a generation request: 500: [...]"
    assert _tells("".join(traceback.format_exception(given_up.value))) == []
