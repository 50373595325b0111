"""The two dialects as thin clients: what goes over the wire, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .flights import Answer, Completed, Flight, until
from .wire import GROUP, PACKED_BYTES, PROMPT, TRANSFER_SECONDS, Wire, columns

if TYPE_CHECKING:
    from pathlib import Path

    from .engines.servers import Server
    from .wire import Named

__all__ = ["VLLM", "SGLang", "wire_to"]


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
        names, dtypes, shapes = columns(tensors)
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
        names, dtypes, shapes = columns(tensors)
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
