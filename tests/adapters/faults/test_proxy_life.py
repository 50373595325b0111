"""The life of the fault proxy: connections, clients that leave, and its own end."""

from collections.abc import Callable
from functools import partial

import anyio
import httpx
import pytest
from anyio.abc import SocketStream, TaskGroup

from adapters.testing import Answer, Delay, Fault, FaultProxy, Silence
from tests.adapters.engines.wire_server import Heard, answering, reply, serving

from .stage import SOON, WHOLE, ask, in_between, raw


@pytest.mark.anyio
@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [Silence, partial(Delay, seconds=1e6)], ids=["silent", "late"])
async def test_a_client_that_hangs_up_frees_the_proxy(kind: Callable[..., Fault], applied: bool) -> None:
    """Waiting for ever ends with the client, and the next request passes."""
    async with in_between(answering(reply(WHOLE))) as (proxy, server):
        proxy.on("/a", kind(applied=applied))
        with pytest.raises(httpx.ReadTimeout):
            await ask(proxy, "POST", "/a", timeout=0.1)
        assert len(server.heard) == applied
        assert (await ask(proxy, "POST", "/a")).json() == WHOLE


@pytest.mark.anyio
async def test_the_engine_learns_that_the_client_hung_up() -> None:
    """Servers abort a generation whose client leaves: the proxy does not hide that from them."""
    left = anyio.Event()

    async def script(_: Heard, stream: SocketStream) -> bool:
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        left.set()
        return False

    async with in_between(script) as (proxy, _):
        with pytest.raises(httpx.ReadTimeout):
            await ask(proxy, "POST", "/generate", timeout=0.1)
        await left.wait()


@pytest.mark.anyio
async def test_refused_connections_are_taken_again_on_the_same_port() -> None:
    """Refusing cuts what is open and refuses what is new; accepting ends that; both can be repeated."""
    async with in_between(answering(reply(WHOLE))) as (proxy, server):
        url = proxy.url
        async with await raw(proxy) as stream:
            for _ in range(2):
                await proxy.refuse()
                with pytest.raises(httpx.ConnectError):
                    await ask(proxy, "POST", "/a")
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        assert server.heard == []
        for _ in range(2):
            proxy.accept()
            assert (await ask(proxy, "POST", "/a")).json() == WHOLE
        assert proxy.url == url


@pytest.mark.anyio
async def test_an_engine_that_is_not_there_closes_the_connection() -> None:
    """The proxy adds no answer of its own."""
    async with in_between(answering(reply(WHOLE))) as (proxy, server):
        await server.listener.aclose()
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(proxy, "POST", "/a")


@pytest.mark.anyio
async def test_a_connection_carries_request_after_request() -> None:
    """Kept connections stay kept, and a request that comes with the one before it is not lost."""
    async with in_between(answering(reply(WHOLE))) as (proxy, _), await raw(proxy) as stream:
        await stream.send(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
        answered = b""
        while answered.count(b"success") < 3:
            answered += await stream.receive()
    assert [seen.connection for seen in proxy.seen] == [0, 0, 0]


@pytest.mark.anyio
async def test_many_clients_meet_each_scripted_fault_once() -> None:
    """However requests interleave, each occurrence meets one fault, and each reply goes to who asked."""
    statuses: list[int] = []
    async with in_between(answering(reply(WHOLE))) as (proxy, _):
        proxy.on("/a", *[Answer(400 + index) for index in range(20)])

        async def client() -> None:
            statuses.append((await ask(proxy, "POST", "/a")).status_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(client)
    assert sorted(statuses) == [200] * 20 + list(range(400, 420))


@pytest.mark.anyio
async def test_it_ends_with_its_block_whatever_is_open() -> None:
    """Requests that wait are cut, nothing listens any more, and the block's own error comes out as it is."""
    done = anyio.Event()

    async def client(proxy: FaultProxy) -> None:
        with pytest.raises(httpx.TransportError):
            await ask(proxy, "POST", "/a")
        with pytest.raises(httpx.ConnectError):
            await ask(proxy, "POST", "/a")
        done.set()

    async def fail(proxy: FaultProxy, tasks: TaskGroup) -> None:
        async with proxy:
            tasks.start_soon(client, proxy)
            await proxy.until(1)
            raise ZeroDivisionError

    async with serving(answering(reply(WHOLE))) as server, anyio.create_task_group() as tasks:
        with pytest.raises(ZeroDivisionError):
            await fail(FaultProxy(server.url).always("*", Silence()), tasks)
        with anyio.fail_after(SOON):
            await done.wait()


@pytest.mark.anyio
async def test_a_cancelled_block_is_cancelled() -> None:
    """A deadline around the block takes effect, also while requests wait in the proxy."""
    async with serving(answering(reply(WHOLE))) as server:
        with anyio.move_on_after(0.05) as scope:
            async with FaultProxy(server.url).always("*", Silence()) as proxy:
                await ask(proxy, "POST", "/a")
        assert scope.cancelled_caught


@pytest.mark.anyio
async def test_it_serves_once() -> None:
    """Outside of its block it cannot be used, and says so."""
    proxy = FaultProxy("http://127.0.0.1:1")
    with pytest.raises(RuntimeError, match="outside of its block"):
        proxy.accept()
    async with proxy:
        pass
    with pytest.raises(RuntimeError, match="make another one"):
        await proxy.__aenter__()
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        FaultProxy("localhost")
