"""Names, URLs and secrets of HTTP engines."""

from typing import Any

import pytest
from anyio.abc import SocketStream

from adapters.engines import HttpEngine, SGLangEngine, VLLMEngine
from adapters.engines.sglang import SGLang
from lifecycle import errors
from lifecycle.states import PauseMode

from .http_stage import CONTINUE, FACTS, REQUEST, engine_on
from .wire_server import Heard, reply


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["key", "url"])
async def test_credentials_are_sent_and_never_shown(how: str) -> None:
    """A server that echoes the credentials does not get them into a detail, an error, a name or a repr."""
    secret = "s3cr3t-of-mine"  # noqa: S105 - it is what must not be shown

    async def echo(heard: Heard, stream: SocketStream) -> bool:
        await stream.send(reply({"message": f"{heard.headers['authorization']} {secret}"}, 401))
        return True

    async with engine_on(echo) as (_, server):
        if how == "key":
            engine = SGLangEngine(server.url, api_key=secret)
        else:
            engine = SGLangEngine(server.url.replace("http://", f"http://me:{secret}@"))
        ack = await engine.perform(CONTINUE, FACTS, timeout=5)
        with pytest.raises(errors.GenerationRefused) as caught:
            await engine.generate(REQUEST, timeout=5)
        await engine.aclose()
        sent = server.heard[0].headers["authorization"]
    token = sent.split(" ")[1]
    assert sent.split(" ")[0] == ("Bearer" if how == "key" else "Basic")
    shown = f"{ack} {caught.value} {engine!r} {engine.name}"
    assert "***" in ack.detail
    assert secret not in shown
    assert token not in shown


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000/", "10.0.0.1:8000"),
        ("https://engine", "engine:443"),
        ("http://engine/a/b", "engine:80/a/b"),
        ("http://me:pass@engine:8000", "engine:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_the_name_is_host_port_and_path(url: str, name: str) -> None:
    """A name tells engines apart and holds no credentials."""
    engine = HttpEngine(url, SGLang())
    assert (engine.name, HttpEngine(url, SGLang(), name="left").name) == (name, "left")
    assert repr(engine) == f"HttpEngine(name='{name}', kind='sglang')"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("10.0.0.1:8000", "http://"),
        ("ftp://me:hush@engine", "not 'ftp'"),
        ("http://", "no host"),
        ("http://me:hush@engine:99999", "port"),
        ("http://me:hush@engine?x=1", "no query"),
        ("http://me:hush@engine#x", "no query"),
        ("", "http://"),
    ],
)
def test_a_senseless_url_is_refused_without_repeating_it(url: str, words: str) -> None:
    """The error says what is wrong; it does not show a password."""
    with pytest.raises(ValueError, match=words) as caught:
        SGLangEngine(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"api_key": ""}, {"api_key": "a\nb"}, {"api_key": "ключ"}, {"name": ""}, {"retries": -1}]
)
def test_senseless_options_are_refused(options: dict[str, Any]) -> None:
    """What can't work is refused when the engine is made."""
    with pytest.raises(ValueError, match=r"api_key|name|retries"):
        SGLangEngine("http://engine:1", **options)


def test_credentials_are_given_once() -> None:
    """Two sets of credentials are a mistake."""
    with pytest.raises(ValueError, match="choose one"):
        SGLangEngine("http://me:x@engine:1", api_key="k")


def test_each_server_has_its_capabilities() -> None:
    """An engine can do what its dialect can."""
    assert PauseMode.IN_PLACE in SGLangEngine("http://e:1").capabilities.pause_modes
    assert VLLMEngine("http://e:1").capabilities.at_risk_from_begin == {"broadcast"}
