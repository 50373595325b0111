"""A proxy in front of a scripted server, and clients that hide nothing."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
from anyio.abc import SocketStream

from adapters.engines.connections import unused_context
from adapters.testing import FaultProxy
from tests.adapters.engines.wire_server import Script, WireServer, serving

WHOLE = {"success": True, "message": "ok"}
"""What the scripted server answers."""
SOON = 60.0
"""Seconds after which a test that ought to be done long ago fails."""


@asynccontextmanager
async def in_between(script: Script) -> AsyncIterator[tuple[FaultProxy, WireServer]]:
    """Serve `script` behind a proxy."""
    with anyio.fail_after(SOON):
        async with serving(script) as server, FaultProxy(server.url) as proxy:
            yield proxy, server


async def ask(
    proxy: FaultProxy,
    method: str,
    path: str,
    *,
    json: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = SOON,
) -> httpx.Response:
    """Make one request through `proxy`, on a connection of its own."""
    async with httpx.AsyncClient(verify=unused_context(), trust_env=False, timeout=timeout) as client:
        return await client.request(method, proxy.url + path, json=json, headers=dict(headers or {}))


async def raw(proxy: FaultProxy) -> SocketStream:
    """Return a connection to `proxy`."""
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    return await anyio.connect_tcp(host, int(port))
