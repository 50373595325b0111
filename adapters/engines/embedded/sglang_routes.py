"""SGLang's HTTP routes, with the bodies, statuses and traps of version 0.5.23.

Not reproduced: the rare 400 of an update with `abort_all_requests` (a race in the real server), `/v1/completions`,
updates from tensors or over IPC, and the tokenizer's own routes. An unavailable backend in
/init_weights_update_group is refused at once, where the real server waits for the trainer first.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from adapters.engines.embedded import http
from adapters.engines.embedded.engine import EngineDeadError
from adapters.engines.embedded.http import BadRequestError, field, typed_json_object
from adapters.engines.embedded.scheduler import Fatal
from adapters.engines.embedded.sglang_generation import GenerateRoute
from adapters.engines.embedded.sglang_manager import TokenizerManager
from adapters.engines.embedded.sglang_weights import Announcement, WeightUpdater, rows_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from adapters.engines.embedded.engine import Engine
    from adapters.engines.embedded.sglang_weights import Outcome

__all__ = ["sglang_app"]

_VERSION = "0.5.23"
_PAUSE_MODES = ("abort", "retract", "in_place")
_PAUSE = {"type": "object", "properties": {"mode": {"type": "string", "enum": list(_PAUSE_MODES), "default": "abort"}}}
_BODIES = {"/pause_generation": {"requestBody": {"content": {"application/json": {"schema": _PAUSE}}}}}
_DEFAULT_GROUP = "weight_update_group"
_FLUSH_POLL_SECONDS = 0.01


def sglang_app(engine: Engine) -> Starlette:
    """Build the ASGI application of an SGLang server around `engine`."""
    manager = TokenizerManager(engine)
    generate = GenerateRoute(manager)
    control = _Control(manager)
    info = _Info(manager, generate)
    both = ["GET", "POST"]
    routes = [
        Route("/generate", generate.__call__, methods=["POST", "PUT"]),
        Route("/pause_generation", control.pause_generation, methods=["POST"]),
        Route("/continue_generation", control.continue_generation, methods=["POST"]),
        Route("/abort_request", control.abort_request, methods=["POST"]),
        Route("/flush_cache", control.flush_cache, methods=both),
        Route("/update_weights_from_disk", control.update_weights_from_disk, methods=["POST"]),
        Route("/init_weights_update_group", control.init_weights_update_group, methods=["POST"]),
        Route("/destroy_weights_update_group", control.destroy_weights_update_group, methods=["POST"]),
        Route("/begin_weight_update", control.begin_weight_update, methods=["POST"]),
        Route("/end_weight_update", control.end_weight_update, methods=["POST"]),
        Route("/update_weights_from_distributed", control.update_weights_from_distributed, methods=["POST"]),
        Route("/update_weight_version", control.update_weight_version, methods=["POST"]),
        Route("/get_weights_by_name", control.get_weights_by_name, methods=both),
        Route("/weights_checker", control.weights_checker, methods=both),
        Route("/release_memory_occupation", control.release_memory_occupation, methods=both),
        Route("/resume_memory_occupation", control.resume_memory_occupation, methods=both),
        Route("/slow_down", control.slow_down, methods=both),
        Route("/ready", info.ready, methods=["GET"]),
        Route("/health", info.health, methods=["GET"]),
        Route("/health_generate", info.health, methods=["GET"]),
        Route("/model_info", info.model_info, methods=["GET"]),
        Route("/get_model_info", info.model_info, methods=["GET"]),
        Route("/server_info", info.server_info, methods=["GET"]),
        Route("/get_server_info", info.server_info, methods=["GET"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/loads", info.loads, methods=["GET"]),
    ]

    async def openapi(_: Request) -> Response:
        return http.openapi("SGLang", _VERSION, routes, _BODIES)

    return Starlette(
        routes=[*routes, Route("/openapi.json", openapi)],
        exception_handlers={
            BadRequestError: _bad_request,
            HTTPException: _http_error,
            Fatal: _survived,
            EngineDeadError: _no_answer,
        },
    )


class _Control:
    """The routes that change something."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._engine = manager.engine
        self._updater = WeightUpdater(manager.engine.scheduler, manager.engine.weights)
        self._flushing = False

    async def pause_generation(self, request: Request) -> Response:
        body = await typed_json_object(request)
        mode = http.choice("mode", field(body, "mode", str, "abort"), _PAUSE_MODES)
        await self._manager.pause(mode)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: Request) -> Response:
        await typed_json_object(request)
        await self._manager.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def abort_request(self, request: Request) -> Response:
        body = await typed_json_object(request)
        request_id = field(body, "rid", str, "")
        if field(body, "abort_all", bool, False):
            self._manager.abort(lambda _: True)
        elif request_id:
            self._manager.abort_request(request_id)
        return Response(status_code=200)

    async def flush_cache(self, request: Request) -> Response:
        if self._flushing:
            return PlainTextResponse("Another flush_cache is already in progress.\n", status_code=400)
        timeout = float(request.query_params.get("timeout", "0"))
        deadline = time.monotonic() + timeout
        self._flushing = True
        try:
            while not await self._engine.call(self._updater.flush):
                if time.monotonic() >= deadline:
                    problem = "Timed out waiting for idle state." if timeout else "Flush cache failed."
                    return PlainTextResponse(f"{problem}\n", status_code=400)
                await asyncio.sleep(_FLUSH_POLL_SECONDS)
        finally:
            self._flushing = False
        return PlainTextResponse(
            "Cache flushed.\nPlease check backend logs for more details. "
            "(When there are running or waiting requests, the operation will not be performed.)\n"
        )

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await typed_json_object(request)
        path = field(body, "model_path", str)
        version = field(body, "weight_version", str, None)
        load_format = field(body, "load_format", str, None)
        flush = field(body, "flush_cache", bool, True)
        self._abort_all_if_asked(body)
        async with self._manager.updating(holds_gate=False):
            outcome = await self._engine.call(
                lambda: self._updater.from_disk(path, load_format=load_format, version=version, flush=flush)
            )
            if outcome.success:
                self._manager.model_path = self._manager.served_model_name = path
        return self._answer(outcome, version=version, extra={"num_paused_requests": 0})

    async def init_weights_update_group(self, request: Request) -> Response:
        body = await typed_json_object(request)
        name = field(body, "group_name", str, _DEFAULT_GROUP)
        address, port = field(body, "master_address", str), field(body, "master_port", int)
        rank, world_size = field(body, "rank_offset", int), field(body, "world_size", int)
        backend = field(body, "backend", str, "nccl")
        timeout = self._engine.options.transfer_timeout_seconds
        return self._answer(
            await self._engine.call(
                lambda: self._updater.join(
                    name,
                    address=address,
                    port=port,
                    rank=rank,
                    world_size=world_size,
                    backend=backend,
                    timeout=timeout,
                )
            )
        )

    async def destroy_weights_update_group(self, request: Request) -> Response:
        name = field(await typed_json_object(request), "group_name", str, _DEFAULT_GROUP)
        return self._answer(await self._engine.call(lambda: self._updater.leave(name)))

    async def begin_weight_update(self, request: Request) -> Response:
        body = await typed_json_object(request)
        http.choice("selector", field(body, "selector", str, "all"), ("target", "draft", "all"))
        async with self._manager.updating(holds_gate=True):
            return self._answer(await self._engine.call(self._updater.begin))

    async def end_weight_update(self, request: Request) -> Response:
        await typed_json_object(request)
        async with self._manager.updating(holds_gate=True):
            return self._answer(await self._engine.call(self._updater.end))

    async def update_weights_from_distributed(self, request: Request) -> Response:
        body = await typed_json_object(request)
        announced = Announcement(
            names=field(body, "names", list),
            dtypes=field(body, "dtypes", list),
            shapes=field(body, "shapes", list),
            group=field(body, "group_name", str, _DEFAULT_GROUP),
            bucket=field(body, "load_format", str, None) == "flattened_bucket",
        )
        version = field(body, "weight_version", str, None)
        flush = field(body, "flush_cache", bool, True)
        self._abort_all_if_asked(body)
        async with self._manager.updating(holds_gate=True):
            outcome = await self._engine.call(lambda: self._updater.from_group(announced, version=version, flush=flush))
        return self._answer(outcome, version=version)

    async def update_weight_version(self, request: Request) -> Response:
        body = await typed_json_object(request)
        version = field(body, "new_version", str)
        if field(body, "abort_all_requests", bool, True):
            self._manager.abort(lambda _: True)
        await self._engine.call(lambda: self._engine.scheduler.set_version(version))
        self._manager.version = version
        message = f"Weight version updated to {version}"
        return JSONResponse({"success": True, "message": message, "new_version": version})

    async def get_weights_by_name(self, request: Request) -> Response:
        body = await typed_json_object(request)
        name, count = field(body, "name", str), field(body, "truncate_size", int, 100)

        def rows() -> object:
            tensor = self._engine.weights.get(name)
            return None if tensor is None else rows_of(tensor, count)

        found = await self._engine.call(rows)
        if found is None:
            return JSONResponse({"error": {"message": "Get parameter by name failed"}}, status_code=400)
        return JSONResponse(found)

    async def weights_checker(self, request: Request) -> Response:
        body = await typed_json_object(request) if await request.body() else {}
        action = field(body, "action", str, "checksum")
        if action == "snapshot":
            return JSONResponse({"success": True, "message": "Success."})
        if action == "reset_tensors":
            await self._engine.call(self._updater.reset)
            return JSONResponse({"success": True, "message": "Success."})
        if action != "checksum":
            known = "Torch not compiled with CUDA enabled" if action == "compare" else f"Unsupported {action=}"
            return JSONResponse({"success": False, "message": known}, status_code=400)
        checksums, whole = await self._engine.call(self._engine.weights.checksums)
        rank = {"checksums": checksums, "per_gpu_checksum": whole, "parallelism_info": [{"tp_rank": 0, "tp_size": 1}]}
        return JSONResponse({"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole})

    async def release_memory_occupation(self, request: Request) -> Response:
        await self._engine.call(self._updater.release)
        return JSONResponse(None)

    async def resume_memory_occupation(self, request: Request) -> Response:
        await self._engine.call(self._updater.reoccupy)
        return JSONResponse(None)

    async def slow_down(self, request: Request) -> Response:
        body = await typed_json_object(request)
        if "forward_sleep_time" not in body:
            raise BadRequestError("1 validation error: field 'forward_sleep_time' is required")
        seconds = field(body, "forward_sleep_time", float, None)

        def slow_down() -> None:
            self._engine.scheduler.forward_sleep_seconds = seconds

        await self._engine.call(slow_down)
        return JSONResponse(None)

    def _abort_all_if_asked(self, body: dict[str, Any]) -> None:
        if field(body, "abort_all_requests", bool, False):
            self._manager.abort(lambda _: True)

    def _answer(self, outcome: Outcome, *, version: str | None = None, extra: dict[str, Any] | None = None) -> Response:
        if outcome.success and version is not None:
            self._manager.version = version
        body = {"success": outcome.success, "message": outcome.message, **(extra or {})}
        return JSONResponse(body, status_code=200 if outcome.success else 400)


class _Info:
    """The routes that only tell."""

    def __init__(self, manager: TokenizerManager, generate: GenerateRoute) -> None:
        self._manager, self._generate = manager, generate
        self._engine = manager.engine

    async def ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._manager.healthy and not self._manager.paused else 503)

    async def health(self, request: Request) -> Response:
        alive = await self._manager.alive(lambda: asyncio.create_task(self._generate.generate_one()))
        return Response(status_code=200 if alive else 503)

    async def model_info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "model_path": self._manager.model_path,
                "tokenizer_path": self._engine.path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._manager.version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
            }
        )

    async def server_info(self, request: Request) -> Response:
        def state() -> dict[str, Any]:
            scheduler = self._engine.scheduler
            return {
                "forward_sleep_time": scheduler.forward_sleep_seconds,
                "weight_version": scheduler.version,
            }

        internal = await self._engine.call(state)
        return JSONResponse(
            {
                "model_path": self._manager.model_path,
                "served_model_name": self._manager.served_model_name,
                "tokenizer_path": self._engine.path,
                "tp_size": 1,
                "dp_size": 1,
                "device": "cpu",
                "dtype": self._engine.config.dtype,
                "context_length": self._engine.max_context,
                "max_running_requests": self._engine.options.max_running_requests,
                "random_seed": self._engine.seed,
                "stream_interval": 1,
                "incremental_streaming_output": self._engine.options.incremental_streaming_output,
                "weight_version": self._manager.version,
                "version": _VERSION,
                "internal_states": [internal],
            }
        )

    async def loads(self, request: Request) -> Response:
        """Tell what runs and waits now, where the real server tells it as of the scheduler's last report."""

        def load() -> dict[str, Any]:
            scheduler = self._engine.scheduler
            return {
                "timestamp": time.time(),
                "dp_rank": 0,
                "num_running_reqs": len(scheduler.batch),
                "num_waiting_reqs": len(scheduler.waiting),
                "max_running_requests": self._engine.options.max_running_requests,
            }

        return JSONResponse({"version": _VERSION, "loads": [await self._engine.call(load)]})

    async def models(self, request: Request) -> Response:
        name = self._manager.served_model_name
        card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": name}
        card |= {"parent": None, "max_model_len": self._engine.max_context}
        return JSONResponse({"object": "list", "data": [card]})


async def _bad_request(_: Request, error: Exception) -> Response:
    body = {"object": "error", "message": str(error), "type": "Bad Request", "param": None, "code": 400}
    return JSONResponse(body, status_code=400)


async def _survived(_: Request, error: Exception) -> Response:
    """Answer what would have killed the server, were its traps lethal."""
    return JSONResponse({"success": False, "message": str(error)}, status_code=400)


async def _no_answer(request: Request, _: Exception) -> Response:
    """A dead SGLang answers nobody; the process ends soon."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return http.gone()


async def _http_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse({"detail": error.detail}, status_code=error.status_code, headers=error.headers)
