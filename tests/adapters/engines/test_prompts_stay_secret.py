"""No error holds a prompt, however a server echoes it: whole or streamed, in either dialect."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from adapters.engines.dialect import Dialect, HttpEnd, HttpEvent, Reply, Streamed
from adapters.engines.generation import without_tokens
from adapters.engines.sglang import SGLang
from adapters.engines.vllm import VLLM
from lifecycle import errors
from lifecycle.generation import GenerationRequest

from .dialogue import OPENED, answer, event, words

PROMPT = [48213, -7, 91377, 60011]
REQUEST = GenerationRequest(input_ids=PROMPT, max_new_tokens=4)
ECHOES = {
    "JSON": json.dumps(PROMPT),
    "compact": json.dumps(PROMPT, separators=(",", ":")),
    "repr": repr(tuple(PROMPT)),
    "commas": ", ".join(map(str, PROMPT)),
    "spaces": " ".join(map(str, PROMPT)),
    "lines": "\n".join(map(str, PROMPT)),
    "escaped lines": "\\n".join(map(str, PROMPT)),
    "quoted": ", ".join(f"'{token}'" for token in PROMPT),
    "quoted JSON": json.dumps(json.dumps([str(token) for token in PROMPT])),
    "tensor": f"tensor([{', '.join(map(str, PROMPT))}])",
    "batch": json.dumps([PROMPT, PROMPT]),
    "floats": json.dumps([float(token) for token in PROMPT]),
    "pipes": "|".join(map(str, PROMPT)),
    "a field": f"'input': {PROMPT[0]}",
    "JSON field": json.dumps({"prompt": f"the prompt was {PROMPT[0]}"}),
    "one token": f"[{PROMPT[0]}]",
    "at the end": f"{'long ' * 55}{json.dumps(PROMPT)}",
}


def whole(status: int) -> Callable[[str], list[Reply | Streamed]]:
    """Say it in an error's body."""
    return lambda echo: [answer({"error": {"message": f"bad request {echo}."}}, status)]


def told(echo: str) -> list[Reply | Streamed]:
    """Say it in a body that denies its status."""
    return [answer({"success": False, "message": f"bad request {echo}."})]


def page(echo: str) -> list[Reply | Streamed]:
    """Say it in something that is not JSON."""
    return [words(f"bad request {echo}.", 502)]


def validation(echo: str) -> list[Reply | Streamed]:
    """Say it as FastAPI does, in a list of details."""
    return [answer({"detail": [{"msg": f"bad request {echo}.", "loc": ["body"]}]}, 422)]


def streamed(code: int) -> Callable[[str], list[Reply | Streamed]]:
    """Say it in an event."""
    return lambda echo: [OPENED, event({"error": {"message": f"bad request {echo}.", "code": code}})]


def bare(echo: str) -> list[Reply | Streamed]:
    """Say it where an event of JSON is due."""
    return [OPENED, HttpEvent(text=f"bad request {echo}.")]


def aborted(code: int) -> Callable[[str], list[Reply | Streamed]]:
    """Say it as the reason of an abort, which only one of the dialects reads."""
    reason = {"type": "abort", "status_code": code, "err_type": "BadRequestError"}

    def replies(echo: str) -> list[Reply | Streamed]:
        meta = {"finish_reason": {**reason, "message": f"bad request {echo}."}, "completion_tokens": 0}
        return [OPENED, event({"output_ids": [], "meta_info": meta})]

    return replies


def _say(dialect: Dialect, replies: list[Reply | Streamed]) -> None:
    steps = dialect.generate(REQUEST, engine="E1", stream=True)
    next(steps)
    for reply in [*replies, HttpEnd(), HttpEnd()]:
        steps.send(reply)


@pytest.mark.parametrize("dialect", [SGLang, VLLM])
@pytest.mark.parametrize(
    "replies",
    [whole(400), whole(500), told, page, validation, streamed(400), streamed(500), bare, aborted(400), aborted(503)],
    ids=["400", "500", "200", "page", "422", "event 400", "event 500", "no JSON", "abort 400", "abort 503"],
)
@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
def test_an_error_says_nothing_of_the_prompt(
    dialect: type[SGLang | VLLM], replies: Callable[[str], list[Reply | Streamed]], echo: str
) -> None:
    """Not one of its tokens, in the message or in the detail, nor in the cause."""
    with pytest.raises((errors.EngineUnavailable, errors.GenerationRefused)) as caught:
        _say(dialect(), replies(echo))
    said = f"{caught.value} {vars(caught.value)} {caught.value.__cause__}"
    assert [token for token in PROMPT if str(abs(token)) in said and abs(token) > 9] == []


@pytest.mark.parametrize(
    "said",
    [
        "Requested token count exceeds the model's maximum context length of 16384 tokens. You requested 100004 tokens",
        "top_p must be in (0, 1], got 3.0. (parameter=top_p, value=3.0)",
        "Token id 99999 is out of vocabulary",
        "at 127.0.0.1:8000 since 2026-11-30 05:13:28, load 0.1, 0.2, 0.3",
    ],
)
def test_what_a_server_says_of_its_own_is_kept(said: str) -> None:
    """Two numbers are limits, not a prompt."""
    assert without_tokens(said) == said


def test_a_long_run_is_cut_in_time() -> None:
    """A prompt of a million tokens takes no longer than its length."""
    assert without_tokens("bad " + ", ".join(map(str, range(200_000))) + ".5") != ""
    kept: Any = without_tokens("bad " + "1 2 x " * 50_000)
    assert len(kept) > 0
