"""vLLM's HTTP routes, with the bodies, statuses and traps of version 0.32 (development mode, scale-out enabled).

Not reproduced: /weight_checker (it is blind on CPU), the fixed 20 ms of every pause, most of /metrics,
log-probabilities of tokens that were not chosen, and collective_rpc methods other than reload_weights.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from adapters.engines.embedded import http
from adapters.engines.embedded.engine import EngineDeadError
from adapters.engines.embedded.http import BadRequestError, field, json_object
from adapters.engines.embedded.vllm_generation import DEAD, CompletionRoutes, error_body
from adapters.engines.embedded.vllm_manager import AsyncLLM
from adapters.engines.embedded.vllm_weights import WeightTransfer, WorkerError

if TYPE_CHECKING:
    from starlette.requests import Request

    from adapters.engines.embedded.engine import Engine

__all__ = ["vllm_app"]

_VERSION = "0.32.0"
_QUERIES = {"/pause": {"parameters": [{"name": "mode", "in": "query"}, {"name": "clear_cache", "in": "query"}]}}
_FLAGS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def vllm_app(engine: Engine) -> Starlette:
    """Build the ASGI application of a vLLM server around `engine`."""
    llm = AsyncLLM(engine)
    model = engine.options.served_model_name or engine.path
    generation = CompletionRoutes(llm, model)
    control = _Control(llm)
    weights = _Weights(llm)
    info = _Info(llm, model)
    routes = [
        Route("/v1/completions", generation.completions, methods=["POST"]),
        Route("/inference/v1/generate", generation.generate, methods=["POST"]),
        Route("/inference/v1/abort_requests", control.scale_out_abort_requests, methods=["POST"]),
        Route("/pause", control.pause, methods=["POST"]),
        Route("/resume", control.resume, methods=["POST"]),
        Route("/is_paused", control.is_paused, methods=["GET"]),
        Route("/abort_requests", control.abort_requests, methods=["POST"]),
        Route("/sleep", control.sleep, methods=["POST"]),
        Route("/wake_up", control.wake_up, methods=["POST"]),
        Route("/is_sleeping", control.is_sleeping, methods=["GET"]),
        Route("/reset_prefix_cache", control.reset_prefix_cache, methods=["POST"]),
        Route("/init_weight_transfer_engine", weights.init, methods=["POST"]),
        Route("/start_weight_update", weights.start, methods=["POST"]),
        Route("/update_weights", weights.update, methods=["POST"]),
        Route("/finish_weight_update", weights.finish, methods=["POST"]),
        Route("/shutdown_weight_transfer_engine", weights.shutdown, methods=["POST"]),
        Route("/collective_rpc", weights.collective_rpc, methods=["POST"]),
        Route("/weight_info", weights.weight_info, methods=["GET"]),
        Route("/update_weight_version", weights.update_weight_version, methods=["POST"]),
        Route("/get_world_size", info.get_world_size, methods=["GET"]),
        Route("/server_info", info.server_info, methods=["GET"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/version", info.version, methods=["GET"]),
        Route("/health", info.health, methods=["GET"]),
        Route("/load", info.load, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
    ]

    async def openapi(_: Request) -> Response:
        return http.openapi("FastAPI", _VERSION, routes, _QUERIES)

    return Starlette(
        routes=[*routes, Route("/openapi.json", openapi)],
        exception_handlers={
            BadRequestError: _bad_request,
            HTTPException: _http_error,
            # Starlette answers with this handler and raises the error again, so that uvicorn closes the connection
            # without having said so: the real server's own trap, by the same means.
            Exception: _unhandled,
        },
    )


class _Control:
    """Pause, abort and sleep."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def pause(self, request: Request) -> Response:
        """Read the query only: a JSON body is ignored, as by the real server."""
        mode = http.choice("mode", request.query_params.get("mode", "abort"), ("abort", "wait", "keep"))
        await self._llm.pause(mode, clear_cache=_flag(request, "clear_cache", default=True))
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._llm.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": await self._llm.is_paused()})

    async def abort_requests(self, request: Request) -> Response:
        body = await json_object(request)
        ids: Any = body.get("request_ids")
        if not ids:  # an empty list, too, means all
            count = self._llm.tracked
            self._llm.abort(None)
            return JSONResponse({"status": "aborted", "aborted": count})
        try:
            ids = list(ids)
        except TypeError as error:
            return JSONResponse({"error": f"Failed to abort requests: {error}"}, status_code=500)
        self._llm.abort(ids)
        # How many ids were sent, not how many requests were found.
        return JSONResponse({"status": "aborted", "aborted": len(ids)})

    async def scale_out_abort_requests(self, request: Request) -> Response:
        body = await json_object(request)
        if body.get("request_ids") is None:
            raise BadRequestError("Missing 'request_ids' in request body")
        self._llm.abort(field(body, "request_ids", list))
        return Response(status_code=200)

    async def sleep(self, request: Request) -> Response:
        level = http.choice("level", request.query_params.get("level", "1"), ("0", "1", "2"))
        mode = http.choice("mode", request.query_params.get("mode", "abort"), ("abort", "wait", "keep"))
        await self._llm.sleep(int(level), mode)
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        awake = await self._llm.wake_up(tags)
        return JSONResponse({"status": "awake" if awake else "sleeping", "tags": tags})

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": await self._llm.is_sleeping()})

    async def reset_prefix_cache(self, request: Request) -> Response:
        running = _flag(request, "reset_running_requests", default=False)
        return JSONResponse({"success": await self._llm.reset_prefix_cache(reset_running_requests=running)})


class _Weights:
    """Weight transfer, reload and version."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._engine = llm.engine
        options = self._engine.options
        self._transfer = WeightTransfer(
            self._engine.scheduler,
            self._engine.weights,
            backend=options.weight_transfer_backend,
            timeout=options.transfer_timeout_seconds,
        )

    async def init(self, request: Request) -> Response:
        info = field(await json_object(request), "init_info", dict)
        await self._engine.call(lambda: self._transfer.init(info))
        return JSONResponse({"message": "Weight transfer initialized"})

    async def start(self, request: Request) -> Response:
        await self._engine.call(self._transfer.start)
        return JSONResponse({"message": "Weight update started"})

    async def update(self, request: Request) -> Response:
        body = await json_object(request)
        info: Any = body.get("update_info")
        if not isinstance(info, dict | list):
            raise BadRequestError("Missing 'update_info' in request body", param="update_info")
        await self._engine.call(lambda: self._transfer.update(info))
        return JSONResponse({"message": "Weights updated"})

    async def finish(self, request: Request) -> Response:
        body = await json_object(request) if await request.body() else {}
        version = field(body, "weight_version", str, None)
        await self._engine.call(lambda: self._transfer.finish(version))
        return JSONResponse({"message": "Weight update finished"})

    async def shutdown(self, request: Request) -> Response:
        await self._engine.call(self._transfer.shutdown)
        return JSONResponse({"message": "Weight transfer shut down"})

    async def collective_rpc(self, request: Request) -> Response:
        body = await json_object(request)
        if body.get("method") is None:
            raise BadRequestError("Missing 'method' in request body", param="method")
        method, kwargs = field(body, "method", str), field(body, "kwargs", dict, {})
        if method != "reload_weights":
            raise WorkerError(f"'CPUWorker' object has no attribute '{method}'")
        path = field(kwargs, "weights_path", str, None)
        await self._engine.call(lambda: self._transfer.reload(path))
        return JSONResponse({"results": [None]})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": await self._engine.call(lambda: self._engine.scheduler.version)})

    async def update_weight_version(self, request: Request) -> Response:
        version = field(await json_object(request), "new_version", str)
        await self._engine.call(lambda: self._engine.scheduler.set_version(version))
        return JSONResponse({"success": True, "new_version": version})


class _Info:
    """The routes that only tell; none of them asks the scheduler, so they answer while it is blocked."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._llm, self._model = llm, model
        self._engine = llm.engine

    async def get_world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": 1})

    async def server_info(self, request: Request) -> Response:
        backend = self._engine.options.weight_transfer_backend
        config = {
            "model": self._engine.path,
            "served_model_name": self._model,
            "max_model_len": self._engine.max_context,
            "max_num_seqs": self._engine.options.max_running_requests,
            "dtype": self._engine.config.dtype,
            "seed": self._engine.seed,
            "weight_transfer_config": None if backend is None else {"backend": backend},
        }
        return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def models(self, request: Request) -> Response:
        card = {"id": self._model, "object": "model", "created": int(time.time()), "owned_by": "vllm"}
        card |= {"root": self._engine.path, "parent": None, "max_model_len": self._engine.max_context}
        return JSONResponse({"object": "list", "data": [card]})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": _VERSION})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.dead is None else 503)

    async def load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._llm.server_load})

    async def metrics(self, request: Request) -> Response:
        running, waiting = self._engine.scheduler.gauges
        labels = f'{{engine="0",model_name="{self._model}"}}'
        return PlainTextResponse(
            "# TYPE process_start_time_seconds gauge\n"
            f"process_start_time_seconds {self._engine.started:.2f}\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{labels} {running}\n"
            "# TYPE vllm:num_requests_waiting gauge\n"
            f"vllm:num_requests_waiting{labels} {waiting}\n"
        )


def _flag(request: Request, name: str, *, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    http.choice(name, value.lower(), _FLAGS)
    return _FLAGS[value.lower()]


async def _bad_request(_: Request, error: Exception) -> Response:
    param = error.param if isinstance(error, BadRequestError) else None
    return JSONResponse(error_body(str(error), "Bad Request", 400, param), status_code=400)


async def _http_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    body = error_body(error.detail, error.detail, error.status_code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _unhandled(_: Request, error: Exception) -> Response:
    message = DEAD if isinstance(error, EngineDeadError) else str(error)
    if isinstance(error, WorkerError):
        message = (
            f"Call to collective_rpc method failed: Worker failed with error '{message}', please check the stack trace "
            "above for the root cause"
        )
    return JSONResponse(error_body(message, "InternalServerError", 500), status_code=500)
