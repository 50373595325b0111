"""vLLM's dialect, as vLLM 0.32 was seen to answer with `VLLM_SERVER_DEV_MODE=1`.

A pause takes query parameters only: a mode in a body is ignored and aborts. Once `start_weight_update` has answered,
the model is on meta tensors, and a continue before a good finish kills the server: so the begin puts weights at risk.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from lifecycle import errors, events
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest, Segment
from lifecycle.ports import Acknowledgement, Capabilities, Channel, EngineReport
from lifecycle.states import Outcome, PauseMode

from .dialect import (
    DONE,
    HttpCall,
    HttpReply,
    Lane,
    Mapped,
    NoReply,
    Reply,
    Steps,
    Streaming,
    classify,
    explained,
    field_of,
    get,
    nothing_to_do,
    refuse,
    says,
    simply,
    status_of,
)
from .generation import generation_body
from .offer import DESCRIPTION, Offer, described
from .streaming import follow, hand_on
from .vllm_generation import chunk_of, completion_body, segment_of, tokens_body
from .vllm_process import backend_of, lacking, start_of

_MODES = {PauseMode.ABORT: "abort", PauseMode.WAIT: "wait", PauseMode.KEEP: "keep"}
_TOKENS = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"
_NO_START = "without a matching start"
_NO_CONTROL = (
    "this server has no control routes: start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, "
    "and in a version that has /pause and /is_paused"
)

_OURS = "GlooWeightTransferEngine"
_NO_GROUP = (
    "publish through Disk(), or install rollout-lifecycle-vllm in its environment and start it with "
    """--weight-transfer-config '{"backend": "gloo"}'"""
)


def _post(path: str, body: Any = None, *, idempotent: bool = False, query: Mapping[str, str] | None = None) -> HttpCall:
    return HttpCall(path=path, body=body, idempotent=idempotent, query=query or {})


class VLLM(Mapped):
    """How a vLLM server is spoken to.

    It remembers, of one server: which process it is, whether that offers generation by tokens and streams, and whether
    requests are kept in it.
    """

    kind = "vllm"

    def __init__(self) -> None:
        self._process: str | None = None
        self._tokens: bool | None = None
        self._streams = True
        self._kept = False

    @property
    def capabilities(self) -> Capabilities:
        """A broadcast puts weights at risk from its begin. Versions are reported with `--enable-scale-out` only."""
        return Capabilities(
            pause_modes=frozenset(_MODES),
            at_risk_from_begin=frozenset({"broadcast"}),
            reports_versions=self._tokens is not False,
            streams=self._streams,
        )

    # ------------------------------------------------------------------------------------------------------- probing

    def probe(self) -> Steps[Acknowledgement]:
        """Ask for version, pause, process, label and ranks; a process that was not met before, for what it offers."""
        version = yield get("/version")
        if not (ack := classify(version)).done:
            return ack
        paused = yield get("/is_paused")
        if status_of(paused) == 404:
            return refuse(_NO_CONTROL)
        if not (ack := classify(paused)).done:
            return ack
        started = start_of((yield get("/metrics")))
        if started is None or started != self._process:
            if not (ack := (yield from self._meet(field_of(version, "version")))).done:
                return ack
            self._process = started
        label = yield get("/weight_info")
        world = yield get("/get_world_size")
        for reply in (label, world):
            if not status_of(reply):
                return classify(reply)
        asleep = yield get("/is_sleeping")
        is_paused = field_of(paused, "is_paused") is True
        if not is_paused:
            self._kept = False
        report = EngineReport(
            kind=self.kind,
            server_version=field_of(version, "version"),
            incarnation=started,
            paused=is_paused,
            # A paused engine says that it sleeps, so only one that isn't paused is believed.
            asleep=field_of(asleep, "is_sleeping") is True and not is_paused,
            label=field_of(label, "weight_version"),
            world_size=field_of(world, "world_size") or 1,
        )
        return evolve(DONE, report=report)

    def _meet(self, version: Any) -> Steps[Acknowledgement]:
        """Find out what a process offers. Not DONE for a combination of routes that this dialect does not know."""
        about = yield get(DESCRIPTION)
        if not described(about):
            return classify(about)
        offer = Offer.of(about)
        if (reason := lacking(offer, version)) is not None:
            return refuse(reason)
        # An empty body is refused by a route that is offered, before anything is generated.
        offered = yield _post(_TOKENS, {}, idempotent=True)
        if status_of(offered) == 401:
            return explained(classify(offered), "the server refused the API key")
        self._tokens = status_of(offered) in {400, 422}
        self._streams = offer.reads(_TOKENS if self._tokens else _COMPLETIONS, "stream")
        return DONE

    def _probe(self, _request: events.ProbeEngine, _engine: EngineFacts) -> Steps[Acknowledgement]:
        return self.probe()

    # ------------------------------------------------------------------------------------------- pausing and the like

    def _pause(self, request: events.PauseGeneration, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if request.mode not in _MODES:
            return refuse(f"vLLM has no pause mode {request.mode.value!r}")
        ack = yield from self._send_pause(request.mode)
        if not ack.done:
            return ack
        reply = yield get("/is_paused")
        stopped = field_of(reply, "is_paused")
        # A wait pause that somebody continued meanwhile is answered "paused" all the same.
        if stopped is False:
            return evolve(ack, detail="it took the pause and runs again", stopped=False, idle=False)
        return evolve(ack, stopped=stopped) if stopped else explained(ack, "paused, but it does not say so")

    def _send_pause(self, mode: PauseMode) -> Steps[Acknowledgement]:
        # Clearing makes kept requests recompute: without it they would go on with the old weights' cache.
        query = {"mode": _MODES[mode], "clear_cache": "true"}
        reply = yield _post("/pause", idempotent=True, query=query)
        ack = classify(reply)
        if status_of(reply) == 404:
            return explained(ack, _NO_CONTROL)
        # A wait pause does not count requests that an earlier keep had preempted.
        idle = None if mode is PauseMode.KEEP or (mode is PauseMode.WAIT and self._kept) else True
        if ack.outcome is not Outcome.NOT_DONE and mode is PauseMode.KEEP:
            self._kept = True
        if ack.done and mode is PauseMode.ABORT:
            self._kept = False
        return evolve(ack, idle=idle) if ack.done else ack

    def _prove_paused(self, request: events.ProvePaused, _engine: EngineFacts) -> Steps[Acknowledgement]:
        reply = yield get("/is_paused")
        if not (ack := classify(reply)).done:
            return ack
        if field_of(reply, "is_paused") is not True:
            return evolve(DONE, detail="the engine is not paused", stopped=False, idle=False)
        if request.mode not in {PauseMode.ABORT, PauseMode.WAIT}:
            return evolve(ack, stopped=True)
        # True as soon as a pause is pending, while requests still run. A repeated pause is answered when none is left.
        ack = yield from self._send_pause(request.mode)
        return evolve(ack, stopped=True) if ack.done else ack

    def _continue(self, _request: events.ContinueGeneration, _engine: EngineFacts) -> Steps[Acknowledgement]:
        ack = yield from simply(_post("/resume", idempotent=True))
        if ack.done:
            self._kept = False
        return ack

    def _abort(self, _request: events.AbortGeneration, _engine: EngineFacts) -> Steps[Acknowledgement]:
        return simply(_post("/abort_requests", {}, idempotent=True))

    def _canary(self, _request: events.Canary, engine: EngineFacts) -> Steps[Acknowledgement]:
        # Of a prompt of one token a new server on CPU dies, if it is its first.
        tiny = GenerationRequest(input_ids=[0] * 5, max_new_tokens=1, temperature=0.0, ignore_eos=True)
        reply = yield from self._ask_for(tiny, Lane.CONTROL)
        ack = classify(reply)
        choices = field_of(reply, "choices")
        if ack.done and not (choices and choices[0].get("token_ids")):
            return refuse(f"{engine.name} answered a generation without a token")
        return ack

    # -------------------------------------------------------------------------------------------------------- weights

    def _open(self, request: events.OpenTransfer, engine: EngineFacts) -> Steps[Acknowledgement]:
        if (channel := request.channel) is None:
            raise ValueError("OpenTransfer needs a channel")
        if channel.kind != "broadcast":
            return nothing_to_do()
        return self._join(_init_info(channel, engine.name))

    def _join(self, info: dict[str, Any]) -> Steps[Acknowledgement]:
        # Blocks the whole engine core until the trainer joins.
        reply = yield _post("/init_weight_transfer_engine", {"init_info": info})
        ack = classify(reply)
        if status_of(reply) == 404 or says(reply, 500, "not configured"):
            return refuse(f"this server has no weight-transfer backend: {_NO_GROUP}")
        if (refused := re.search(r"Invalid init_info for (\w+)", ack.detail)) and refused[1] != _OURS:
            # Asked only now, since it takes seconds.
            query = {"config_format": "json"}
            config = yield HttpCall(method="GET", path="/server_info", query=query, idempotent=True, limit=15.0)
            backend = backend_of(config) or refused[1]
            return refuse(f"this server's weight-transfer backend {backend!r} does not meet a Broadcast(): {_NO_GROUP}")
        return _not_done_if_refused(reply)

    def _close(self, request: events.CloseTransfer, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if request.channel is None or request.channel.kind != "broadcast":
            return nothing_to_do()
        return _work(_post("/shutdown_weight_transfer_engine"))

    def _begin(self, request: events.BeginUpdate, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if request.kind != "broadcast":
            return DONE
        start = _post("/start_weight_update")
        reply = yield start
        if says(reply, 500, "already active"):
            # Left by a trainer that died. Finishing puts in place whatever it holds; what follows writes it all anew.
            if not (ack := classify((yield _post("/finish_weight_update")))).done:
                return evolve(ack, outcome=Outcome.UNKNOWN)
            ack = classify((yield start))
            return ack if ack.done else evolve(ack, outcome=Outcome.UNKNOWN)
        return refuse(classify(reply).detail) if says(reply, 500, "not configured") else classify(reply)

    def _transfer(self, request: events.TransferWeights, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if (bucket := request.bucket) is None:
            raise ValueError("TransferWeights needs a bucket")
        if bucket.path is not None:
            # The path is always given: left out, the last one would be read again, even a bad one.
            body: dict[str, Any] = {"method": "reload_weights", "args": [], "kwargs": {"weights_path": bucket.path}}
            return _receive(_post("/collective_rpc", body))
        shapes = [list(shape) for shape in bucket.shapes]
        info = {"names": list(bucket.names), "dtype_names": list(bucket.dtypes), "shapes": shapes}
        return _receive(_post("/update_weights", {"update_info": info}))

    def _finish(self, request: events.FinishUpdate, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if request.kind != "broadcast":
            # A reload keeps the old label.
            return simply(_post("/update_weight_version", {"new_version": request.label}, idempotent=True))
        return self._finish_session(request.label)

    def _finish_session(self, label: str) -> Steps[Acknowledgement]:
        reply = yield _post("/finish_weight_update", {"weight_version": label})
        return refuse(classify(reply).detail) if says(reply, 500, _NO_START) else classify(reply)

    def _abandon(self, request: events.AbandonUpdate, engine: EngineFacts) -> Steps[Acknowledgement]:
        if request.kind == "disk":
            return evolve(DONE, untouched=not engine.touched)
        # Without a version, since none was completed: a session in which nothing was loaded gives the old weights back.
        reply = yield _post("/finish_weight_update", idempotent=True)
        # A failed update has closed its session and left the model on meta: closed is not whole.
        if says(reply, 500, _NO_START) or says(reply, 500, "not configured") or status_of(reply) == 404:
            return DONE
        ack = classify(reply)
        return evolve(ack, untouched=ack.done and not engine.touched)

    def _verify(self, request: events.VerifyWeights, _engine: EngineFacts) -> Steps[Acknowledgement]:
        reply = yield get("/weight_info")
        ack = classify(reply)
        label = field_of(reply, "weight_version")
        if ack.done and label != request.label:
            return refuse(f"the engine is labelled {label!r}, not {request.label!r}")
        return ack

    def _flush(self, request: events.FlushCache, _engine: EngineFacts) -> Steps[Acknowledgement]:
        # Kept requests may hold cache that a foreign pause did not clear: preempted, they recompute it.
        query = {"reset_running_requests": "true" if request.mode is PauseMode.KEEP else "false"}
        reply = yield _post("/reset_prefix_cache", idempotent=True, query=query)
        ack = classify(reply)
        return explained(ack, "requests still hold cache") if field_of(reply, "success") is False else ack

    def _label(self, request: events.LabelVersion, _engine: EngineFacts) -> Steps[Acknowledgement]:
        reply = yield get("/weight_info")
        if field_of(reply, "weight_version") == request.label:
            return DONE
        call = _post("/update_weight_version", {"new_version": request.label}, idempotent=True)
        return (yield from simply(call))

    # ----------------------------------------------------------------------------------------------------- generation

    def generate(self, request: GenerationRequest, *, engine: str, stream: bool = False) -> Streaming[Segment]:
        """Generate by tokens with exact version spans where the server offers it, else through `/v1/completions`."""
        if request.images:
            raise errors.GenerationRefused("vLLM's token routes are not given images by this adapter")
        reply = yield from self._ask_for(request, Lane.GENERATION, stream=stream)
        if isinstance(reply, HttpReply) and reply.events:
            return (yield from follow(chunk_of, engine=engine, abort_is_silent=self._tokens is False))
        segment = segment_of(generation_body(reply, engine=engine), engine)
        return (yield from hand_on(segment)) if stream else segment

    def _ask_for(self, request: GenerationRequest, lane: Lane, *, stream: bool = False) -> Steps[Reply]:
        if self._tokens is not False:
            body = tokens_body(request, stream=stream)
            reply = yield HttpCall(path=_TOKENS, body=body, idempotent=True, lane=lane, stream=stream)
            if status_of(reply) not in {403, 404, 405} or self._tokens:
                return reply
            self._tokens = False
        body = completion_body(request, stream=stream)
        return (yield HttpCall(path=_COMPLETIONS, body=body, idempotent=True, lane=lane, stream=stream))

    handlers: ClassVar[Mapping[type[events.Request], Any]] = {
        events.ProbeEngine: _probe,
        events.AbortGeneration: _abort,
        events.PauseGeneration: _pause,
        events.ContinueGeneration: _continue,
        events.ProvePaused: _prove_paused,
        events.OpenTransfer: _open,
        events.BeginUpdate: _begin,
        events.TransferWeights: _transfer,
        events.FinishUpdate: _finish,
        events.VerifyWeights: _verify,
        events.FlushCache: _flush,
        events.LabelVersion: _label,
        events.Canary: _canary,
        events.AbandonUpdate: _abandon,
        events.CloseTransfer: _close,
    }


def _work(call: HttpCall) -> Steps[Acknowledgement]:
    """Make a call that every worker carries out."""
    return _not_done_if_refused((yield call))


def _not_done_if_refused(reply: Reply) -> Acknowledgement:
    """Return what a reply says: a 500 that quotes a worker's error means that it was not done."""
    ack = classify(reply)
    known = ("Worker failed with error", "not configured", "during a weight update")
    return evolve(ack, outcome=Outcome.NOT_DONE) if any(says(reply, 500, words) for words in known) else ack


def _receive(call: HttpCall) -> Steps[Acknowledgement]:
    """Make a call that transfers weights: one that did not reach the workers has touched none."""
    reply = yield call
    ack = classify(reply)
    if says(reply, 500, "Worker failed with error"):
        return evolve(ack, outcome=Outcome.NOT_DONE)
    unsent = isinstance(reply, NoReply) and not reply.sent and not ack.unreachable
    return evolve(ack, untouched=unsent or 400 <= status_of(reply) < 500)


def _init_info(channel: Channel, engine: str) -> dict[str, Any]:
    """Return what a worker with our backend must know to join; vLLM's own refuse what they do not know."""
    info: dict[str, Any] = {
        "master_address": channel.master_address,
        "master_port": channel.master_port,
        "rank_offset": channel.rank_offsets[engine],
        "world_size": channel.world_size,
        "group_name": channel.name,
        "timeout_s": channel.timeout,
        "backend": channel.backend,
        "packed": channel.packed,
    }
    if channel.bucket_bytes:
        info["packed_buffer_size_bytes"] = channel.bucket_bytes
    return info
