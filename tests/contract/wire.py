"""The two dialects as thin clients: what goes over the wire, and what comes back in the same words for both."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

import httpx

from .flights import Answer, Completed, Flight, until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from .engines.servers import Server

    Named = Sequence[tuple[str, Tensor]]

__all__ = ["GROUP", "PACKED_BYTES", "PROMPT", "TRANSFER_SECONDS", "VLLM", "SGLang", "Wire", "wire_to"]

PROMPT = [5, 6, 7, 8]
ROUND_TRIPS = 5
GROUP = "contract"
TRANSFER_SECONDS = 10.0
PACKED_BYTES = 100_000
"""A packed buffer of vLLM's ends as soon as it holds more than this."""


class Wire(ABC):
    """A client of one server. It keeps no pool: vLLM closes connections without saying so.

    Args:
        server: The server.
    """

    dialect: ClassVar[str]
    long: ClassVar[int]
    """Tokens of a request that is still running when the test has done what it wants to do."""
    enough: ClassVar[int]
    """Tokens of a request that is still running some calls later, and does not take too long to its end."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.patience = server.kind.patience
        self._flights: list[Flight] = []
        self._salt = uuid.uuid4().hex[:8]
        # Nothing here is encrypted, and loading certificate authorities would take longer than most tests.
        self._http = httpx.Client(
            base_url=server.url,
            timeout=self.patience,
            trust_env=False,
            verify=False,  # noqa: S501
            headers={"Connection": "close"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.land()
        self._http.close()

    # -- calls -----------------------------------------------------------------------------------------------------

    def get(self, path: str, **query: Any) -> Answer:
        """GET."""
        return _answer(self._http.get(path, params=query or None))

    def post(self, path: str, body: Any = None, **query: Any) -> Answer:
        """POST JSON, or no body at all where it is `None`."""
        return _answer(self._http.post(path, json=body, params=query or None))

    def later(self, path: str, body: Any = None, headers: dict[str, str] | None = None, **query: Any) -> Flight:
        """POST, and go on while it is under way."""
        return self._fly(str(httpx.URL(path, params=query)) if query else path, body, headers=headers)

    def land(self) -> None:
        """Hang up on whatever is still under way."""
        for flight in self._flights:
            flight.hang_up()
        self._flights.clear()

    def named(self, name: str) -> str:
        """Make a name this client's own: a server that notices late that a client is gone aborts by its name."""
        return f"{self._salt}-{name}"

    def exchange(self) -> None:
        """Do some calls that every state answers: by their end the server has read whatever was sent before."""
        for _ in range(ROUND_TRIPS):
            self.get("/v1/models")

    def _fly(self, path: str, body: Any, **more: Any) -> Flight:
        flight = Flight(self.server.url, path, body, patience=self.patience, **more)
        self._flights.append(flight)
        return flight

    # -- generation ------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(
        self, tokens: int, *, stream: bool = False, name: str | None = None, prompt: list[int] = PROMPT
    ) -> Flight:
        """Send a greedy request for `tokens` tokens, under the name that `abort` takes."""

    def fly(self, *, stream: bool = True, name: str | None = None, tokens: int | None = None) -> Flight:
        """Send a long request, and return when the engine makes tokens for it."""
        flight = self.start(tokens or self.long, stream=stream, name=name)
        if stream:
            return flight.begun()
        # First come, first served: what is answered after it proves that it is being served.
        self.exchange()
        self.generate(1)
        return flight

    def generate(self, tokens: int = 8, prompt: list[int] = PROMPT) -> Completed:
        """Generate greedily, and wait for it."""
        return self.start(tokens, prompt=prompt).completed()

    def tokens(self) -> list[int]:
        """The greedy tokens by which weights are told from others."""
        return self.generate().tokens

    def brake(self) -> None:  # noqa: B027 - only one dialect has a brake
        """Slow generation down."""

    def hurry(self) -> None:  # noqa: B027 - only one dialect has a brake
        """Let go of whatever slows generation down."""

    # -- control ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def pause(self, mode: str) -> Answer:
        """Pause."""

    @abstractmethod
    def pause_later(self, mode: str) -> Flight:
        """Pause, and go on while that is under way."""

    @abstractmethod
    def resume(self) -> Answer:
        """Continue."""

    @abstractmethod
    def paused(self) -> bool:
        """Whether the server says that it is paused."""

    @abstractmethod
    def abort(self, name: str) -> Answer:
        """Abort the request of this name."""

    @abstractmethod
    def abort_all(self) -> Answer:
        """Abort everything."""

    @abstractmethod
    def flush(self) -> bool:
        """Ask for the cache to be dropped, and say whether the server did."""

    def until(self, condition: Callable[[], bool]) -> None:
        """Ask again and again until it is so."""
        until(condition, self.patience)

    def until_idle(self) -> None:
        """Wait until the engine has nothing to do."""
        until(self.flush, self.patience)

    # -- weights ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def label(self, version: str) -> Answer:
        """Call the weights `version`, and touch neither them nor any request."""

    @abstractmethod
    def version(self) -> str:
        """What the server says that its weights are called."""

    @abstractmethod
    def load(self, path: Path | str) -> Answer:
        """Load a checkpoint from disk, without a version."""

    @abstractmethod
    def join(self, port: int, *, packed: bool = False) -> Flight:
        """Ask the engine into the group whose store is at `port`, as rank 1 of 2."""

    @abstractmethod
    def begin(self) -> Answer:
        """Open a session of updates."""

    @abstractmethod
    def announce(self, tensors: Named, *, packed: bool = False) -> Flight:
        """Say which tensors follow, so that the engine receives them."""

    @abstractmethod
    def end(self, version: str | None = None) -> Answer:
        """Close the session."""

    @abstractmethod
    def restore(self, path: Path) -> None:
        """Bring the server back to the weights of `path`, called "old", idle, running, with no session or group."""


class SGLang(Wire):
    """SGLang 0.5.23."""

    dialect = "sglang"
    long = 1000
    enough = 40  # on CPU the first request of each length is slow
    _SLOW = 0.02

    def start(
        self, tokens: int, *, stream: bool = False, name: str | None = None, prompt: list[int] = PROMPT
    ) -> Flight:
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": params, "stream": stream}
        return self._fly(
            "/generate", body if name is None else {**body, "rid": self.named(name)}, read=_sglang_completed
        )

    def fly(self, *, stream: bool = True, name: str | None = None, tokens: int | None = None) -> Flight:
        self.brake()
        return super().fly(stream=stream, name=name, tokens=tokens)

    def brake(self) -> None:
        self.post("/slow_down", {"forward_sleep_time": self._SLOW})

    def hurry(self) -> None:
        self.post("/slow_down", {"forward_sleep_time": None})

    def pause(self, mode: str) -> Answer:
        return self.post("/pause_generation", {"mode": mode})

    def pause_later(self, mode: str) -> Flight:
        return self.later("/pause_generation", {"mode": mode})

    def resume(self) -> Answer:
        return self.post("/continue_generation", {})

    def paused(self) -> bool:
        return {200: False, 503: True}[self.get("/ready").status]

    def abort(self, name: str) -> Answer:
        return self.post("/abort_request", {"rid": self.named(name)})

    def abort_all(self) -> Answer:
        return self.post("/abort_request", {"abort_all": True})

    def flush(self) -> bool:
        answer = self.post("/flush_cache")
        assert (answer.status, str(answer.body).split(".")[0]) in {(200, "Cache flushed"), (400, "Flush cache failed")}
        return answer.status == 200

    def label(self, version: str) -> Answer:
        return self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def version(self) -> str:
        return str(self.get("/model_info").body["weight_version"])

    def load(self, path: Path | str, **more: Any) -> Answer:
        return self.post("/update_weights_from_disk", {"model_path": str(path), **more})

    def join(self, port: int, *, packed: bool = False) -> Flight:
        where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        return self.later("/init_weights_update_group", {**where, "group_name": GROUP, "backend": "gloo"})

    def begin(self) -> Answer:
        return self.post("/begin_weight_update", {})

    def announce(self, tensors: Named, *, packed: bool = False, **more: Any) -> Flight:
        names, dtypes, shapes = _columns(tensors)
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": GROUP}
        if packed:
            body["load_format"] = "flattened_bucket"
        return self.later("/update_weights_from_distributed", {**body, **more})

    def end(self, version: str | None = None) -> Answer:
        answer = self.post("/end_weight_update", {})
        if version is not None:
            self.label(version)
        return answer

    def restore(self, path: Path) -> None:
        self.hurry()
        self.resume()
        self.abort_all()
        assert self.post("/flush_cache", timeout=self.patience).status == 200
        self.post("/end_weight_update", {})
        self.post("/destroy_weights_update_group", {"group_name": GROUP})
        assert self.load(path, weight_version="old").status == 200
        assert not self.paused()


class VLLM(Wire):
    """vLLM 0.32.0 in development mode."""

    dialect = "vllm"
    long = 10_000  # more than ten seconds, even alone
    enough = 800

    def start(
        self, tokens: int, *, stream: bool = False, name: str | None = None, prompt: list[int] = PROMPT
    ) -> Flight:
        params = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body: dict[str, Any] = {"token_ids": prompt, "sampling_params": params, "stream": stream}
        headers = {} if name is None else {"X-Request-Id": self.named(name)}
        return self._fly("/inference/v1/generate", body, headers=headers, read=_vllm_completed)

    def pause(self, mode: str, **query: Any) -> Answer:
        return self.post("/pause", mode=mode, **query)

    def pause_later(self, mode: str) -> Flight:
        return self.later("/pause", mode=mode)

    def resume(self) -> Answer:
        return self.post("/resume")

    def paused(self) -> bool:
        return bool(self.get("/is_paused").body["is_paused"])

    def abort(self, name: str) -> Answer:
        return self.post("/abort_requests", {"request_ids": [f"generate-tokens-{self.named(name)}"]})

    def abort_all(self) -> Answer:
        return self.post("/abort_requests", {})

    def flush(self) -> bool:
        answer = self.post("/reset_prefix_cache")
        assert answer.status == 200
        return bool(answer.body["success"])

    def label(self, version: str) -> Answer:
        return self.post("/update_weight_version", {"new_version": version})

    def version(self) -> str:
        return str(self.get("/weight_info").body["weight_version"])

    def load(self, path: Path | str) -> Answer:
        body = {"method": "reload_weights", "args": [], "kwargs": {"weights_path": str(path)}}
        return self.post("/collective_rpc", body)

    def join(self, port: int, *, packed: bool = False) -> Flight:
        where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        how: dict[str, Any] = {"group_name": GROUP, "timeout_s": TRANSFER_SECONDS}
        if packed:
            how |= {"packed": True, "packed_buffer_size_bytes": PACKED_BYTES}
        return self.later("/init_weight_transfer_engine", {"init_info": {**where, **how}})

    def begin(self) -> Answer:
        return self.post("/start_weight_update")

    def announce(self, tensors: Named, *, packed: bool = False) -> Flight:
        names, dtypes, shapes = _columns(tensors)
        return self.later("/update_weights", {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}})

    def end(self, version: str | None = None) -> Answer:
        return self.post("/finish_weight_update", None if version is None else {"weight_version": version})

    def restore(self, path: Path) -> None:
        self.abort_all()
        assert self.pause("abort").status == 200
        assert self.load(path).status == 200
        self.post("/finish_weight_update")  # a reload leaves the session open
        self.label("old")
        self.post("/shutdown_weight_transfer_engine")
        self.post("/wake_up")
        assert self.resume().status == 200
        until(lambda: self.get("/load").body == {"server_load": 0}, self.patience)
        assert not self.paused()


def wire_to(server: Server) -> Wire:
    """Make the client that speaks the server's dialect."""
    return {"sglang": SGLang, "vllm": VLLM}[server.kind.dialect](server)


def _columns(tensors: Named) -> tuple[list[str], list[str], list[list[int]]]:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    return [name for name, _ in tensors], dtypes, [list(tensor.shape) for _, tensor in tensors]


def _answer(response: httpx.Response) -> Answer:
    body: Any = response.text
    if "json" in response.headers.get("content-type", ""):
        with suppress(ValueError):
            body = response.json()
    return Answer(response.status_code, body)


def _sglang_completed(body: Any) -> Completed:
    """Read a whole answer, or the last event of a stream, which holds everything."""
    if isinstance(body, list):
        assert body[-1] == "[DONE]"
        body = body[-2]
    meta = body["meta_info"]
    reason = meta["finish_reason"] or {"type": None}
    spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
    return Completed(body["output_ids"], reason["type"], spans, reason.get("message"))


def _vllm_completed(body: Any) -> Completed:
    """Read a whole answer, or the events of a stream, each of which holds what is new."""
    if isinstance(body, list):
        assert body[-1] == "[DONE]"
        choices = [choice for event in body[:-1] for choice in event["choices"]]
    else:
        choices = [body["choices"][0]]
    spans = [(span["version"], span["start"], span["end"]) for span in choices[-1]["weight_versions"] or []]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    return Completed(tokens, choices[-1]["finish_reason"], spans)
