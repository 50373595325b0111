"""A server of each dialect that does as it is told: enough of one to be probed, and asked for everything once."""

from collections.abc import Mapping
from typing import Any

import anyio
from anyio.abc import SocketStream
from attrs import define, field

from tests.adapters.engines.sglang_stage import ROUTES, SERVER
from tests.adapters.engines.wire_server import Heard, reply

_SPANS = [{"version": "run:7", "start": 0, "end": 1}]
_SGLANG: Mapping[str, bytes] = {
    "/server_info": reply(SERVER.data),
    "/openapi.json": reply(ROUTES.data),
    "/abort_request": reply(text=""),
    "/flush_cache": reply(text="Cache flushed.\nPlease check backend logs for more details."),
    "/generate": reply(
        {
            "output_ids": [7],
            "meta_info": {
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[-0.5, 7, None]],
                "weight_versions": _SPANS,
            },
        }
    ),
}
_NEEDED = ("/resume", "/abort_requests", "/reset_prefix_cache", "/weight_info", "/update_weight_version")
_OFFER: dict[str, Any] = {path: {} for path in _NEEDED}
_OFFER["/pause"] = {"post": {"parameters": [{"name": "mode"}]}}
_VLLM: Mapping[str, bytes] = {
    "/version": reply({"version": "0.32.0"}),
    "/metrics": reply(text="process_start_time_seconds 1.7e9\n"),
    "/openapi.json": reply({"paths": _OFFER}),
    "/get_world_size": reply({"world_size": 1}),
    "/is_sleeping": reply({"is_sleeping": False}),
    "/reset_prefix_cache": reply({"success": True}),
}
_TOKEN = {"token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "length"}
_ROUTES = {"sglang": _SGLANG, "vllm": _VLLM}
_ABSENT = ("/get_model_info", "/get_server_info")
_PAUSES = ("/pause_generation", "/pause")
_CONTINUES = ("/continue_generation", "/resume")


@define(eq=False)
class Obedient:
    """A server that does everything at once; posts that it has no words for are answered ok.

    Whether it is paused and how its weights are labelled is all that it keeps.
    """

    dialect: str
    paused: bool = False
    label: str = "run:7"
    changed: anyio.Event = field(factory=anyio.Event)

    async def until_paused(self) -> None:
        """Wait until it is paused."""
        while not self.paused:
            await self.changed.wait()

    async def __call__(self, heard: Heard, stream: SocketStream) -> bool:
        """Answer one request."""
        path = heard.line.split()[1].partition("?")[0]
        self.paused = path in _PAUSES or (self.paused and path not in _CONTINUES)
        body = heard.body if isinstance(heard.body, dict) else {}
        self.label = body.get("weight_version") or body.get("new_version") or self.label
        self.changed.set()
        self.changed = anyio.Event()
        await stream.send(self._answer(path, body))
        return True

    def _answer(self, path: str, body: dict[str, Any]) -> bytes:
        match path:
            case "/inference/v1/generate":
                return reply({"choices": [_TOKEN]}) if body else reply({"message": "a field is required"}, 400)
            case "/ready":
                return reply({}, 503 if self.paused else 200)
            case "/is_paused":
                return reply({"is_paused": self.paused})
            case "/weight_info" | "/model_info":
                return reply({"weight_version": self.label})
            case _ if path in _ABSENT:
                return reply({"detail": "Not Found"}, 404)
        return _ROUTES[self.dialect].get(path) or reply({"success": True, "status": "ok", "message": "ok"})
