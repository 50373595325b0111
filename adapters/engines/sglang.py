"""SGLang's dialect, as SGLang 0.5.23 was seen to answer.

Every POST has a body, at least `{}`: without one the answer is 400. Defaults that destroy are sent explicitly.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from lifecycle import events
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest, Segment
from lifecycle.ports import Acknowledgement, Bucket, Capabilities, EngineReport
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
    ask,
    classify,
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
from .sglang_generation import chunk_of, generate_body, segment_of
from .streaming import follow, hand_on

_MODES = {PauseMode.ABORT: "abort", PauseMode.IN_PLACE: "in_place", PauseMode.RETRACT: "retract"}
_NEEDED = ("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache", "/update_weight_version")
_BEFORE_LOADING = (
    "must run between begin_weight_update() and end_weight_update()",
    "Failed to receive weights",
    "Failed to get weights iterator",
    "validation error",
)
"""What a transfer that failed before the first weight was written is answered with."""
_FLUSH_REFUSED = "Weights were updated, but the cache was not flushed"


def _post(path: str, *, idempotent: bool = False, **body: Any) -> HttpCall:
    return HttpCall(path=path, body=body, idempotent=idempotent)


class SGLang(Mapped):
    """How an SGLang server is spoken to.

    It remembers, of one server: which pause modes it has, how it was last paused, whether it has weight-update
    sessions, whether it streams, and a label that its front end missed. A probe that finds another process forgets
    them.
    """

    kind = "sglang"

    def __init__(self) -> None:
        self._mode: PauseMode | None = None
        self._modes = frozenset(_MODES)
        self._sessions = True
        self._streams = True
        self._process: tuple[Any, Any] | None = None
        self._unlabelled: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Weights are at risk from the first transfer; replies say which version made which token."""
        return Capabilities(pause_modes=self._modes, reports_versions=True, streams=self._streams)

    # ------------------------------------------------------------------------------------------------------- probing

    def probe(self) -> Steps[Acknowledgement]:
        """Ask for the model, the server and its readiness. Never `/health`: it marks a paused server unhealthy."""
        model = yield from _either("/model_info", "/get_model_info")
        if not (ack := classify(model)).done:
            return ack
        # Answered through the scheduler, so an answer also says that the scheduler is not blocked in a rendezvous.
        server = yield from _either("/server_info", "/get_server_info")
        if not (ack := classify(server)).done:
            return ack
        ready = yield get("/ready")
        if not status_of(ready):
            return classify(ready)
        version, seed = field_of(server, "version"), field_of(server, "random_seed")
        if self._process != (version, seed):
            about = yield get(DESCRIPTION)
            if not described(about):
                return classify(about)
            offer = Offer.of(about)
            if (reason := _unknown(offer, version)) is not None:
                return refuse(reason)
            self._mode = self._unlabelled = None
            self._modes = _modes_of(offer)
            self._sessions = not offer.lacking("/begin_weight_update")
            self._streams = offer.reads("/generate", "stream")
            self._process = (version, seed)
        paused = {200: False, 503: True}.get(status_of(ready))
        if paused is False:
            self._mode = None
        elif paused and self._mode is None:
            # By somebody before us, in a mode that the server does not tell: the one that needs care is assumed.
            self._mode = PauseMode.IN_PLACE
        report = EngineReport(
            kind=self.kind,
            server_version=version,
            # Drawn anew at each start, unless the server was given one.
            incarnation=None if seed is None else f"seed {seed}",
            paused=paused,
            label=field_of(model, "weight_version"),
            world_size=_world_size(server),
            detail="paused, or unhealthy" if paused else "",
        )
        return evolve(DONE, report=report)

    def _probe(self, _request: events.ProbeEngine, _engine: EngineFacts) -> Steps[Acknowledgement]:
        return self.probe()

    # ------------------------------------------------------------------------------------------- pausing and the like

    def _pause(self, request: events.PauseGeneration, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if request.mode not in self._modes:
            return refuse(f"this SGLang has no pause mode {request.mode.value!r}")
        return (yield from self._pause_as(request.mode))

    def _pause_as(self, mode: PauseMode) -> Steps[Acknowledgement]:
        if mode is PauseMode.ABORT and self._mode is PauseMode.IN_PLACE:
            # An abort on top of in_place waits for a forward pass that never comes, and holds the lock that continue
            # needs. Retracted requests wait in the queue, from where an abort answers them at once.
            ack = yield from self._send_pause(PauseMode.RETRACT)
            if not ack.done:
                return ack
            ack = yield from self._send_pause(mode)
            if not ack.done:
                return evolve(ack, outcome=Outcome.UNKNOWN)  # the other pause stands
        elif not (ack := (yield from self._send_pause(mode))).done:
            return ack
        if mode is PauseMode.ABORT:
            return evolve(ack, stopped=True, idle=True)  # answered only when the last request has ended
        # The 200 came before the scheduler acted. Its channel is ordered: an answer to a later call is the proof.
        reply = yield get("/server_info")
        if (proof := classify(reply)).done:
            return evolve(ack, stopped=True)
        return evolve(ack, detail=f"paused, but the scheduler has not answered since: {proof.detail}")

    def _send_pause(self, mode: PauseMode) -> Steps[Acknowledgement]:
        reply = yield _post("/pause_generation", mode=_MODES[mode], idempotent=True)
        ack = classify(reply)
        if ack.outcome is not Outcome.NOT_DONE:
            self._mode = mode
        return ack

    def _prove_paused(self, request: events.ProvePaused, engine: EngineFacts) -> Steps[Acknowledgement]:
        ready = yield get("/ready")
        status = status_of(ready)
        if status == 200:
            return evolve(DONE, detail="the engine is not paused", stopped=False, idle=False)
        # An older server has no /ready: there what is remembered must do.
        if status != 503 and not (status == 404 and engine.paused):
            return classify(ready)
        if request.mode is PauseMode.ABORT:
            # A repeated abort pause is answered when no request is left: that proves idle, which /ready does not.
            return (yield from self._pause_as(PauseMode.ABORT))
        reply = yield get("/server_info")
        ack = classify(reply)
        return evolve(ack, stopped=True) if ack.done else ack

    def _continue(self, _request: events.ContinueGeneration, _engine: EngineFacts) -> Steps[Acknowledgement]:
        ack = yield from simply(_post("/continue_generation", torch_empty_cache=False, idempotent=True))
        if ack.done:
            self._mode = None
        return ack

    def _abort(self, _request: events.AbortGeneration, _engine: EngineFacts) -> Steps[Acknowledgement]:
        return simply(_post("/abort_request", rid="", abort_all=True, idempotent=True), json=False)

    def _canary(self, _request: events.Canary, engine: EngineFacts) -> Steps[Acknowledgement]:
        sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        reply = yield _post("/generate", input_ids=[0], sampling_params=sampling, stream=False, idempotent=True)
        ack = classify(reply)
        if ack.done and not field_of(reply, "output_ids"):
            return refuse(f"{engine.name} answered a generation without a token")
        return ack

    # -------------------------------------------------------------------------------------------------------- weights

    def _open(self, request: events.OpenTransfer, engine: EngineFacts) -> Steps[Acknowledgement]:
        if (channel := request.channel) is None:
            raise ValueError("OpenTransfer needs a channel")
        if channel.kind != "broadcast":
            return nothing_to_do()
        # Blocks the scheduler until the trainer joins, and giving up on it does not free it.
        return simply(
            _post(
                "/init_weights_update_group",
                master_address=channel.master_address,
                master_port=channel.master_port,
                rank_offset=channel.rank_offsets[engine.name],
                world_size=channel.world_size,
                group_name=channel.name,
                backend=channel.backend,
            )
        )

    def _close(self, request: events.CloseTransfer, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if request.channel is None or request.channel.kind != "broadcast":
            return DONE
        reply = yield _post("/destroy_weights_update_group", group_name=request.channel.name)
        return DONE if says(reply, 400, "does not exist") else classify(reply)

    def _begin(self, request: events.BeginUpdate, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if request.kind != "broadcast" or not self._sessions:
            return DONE
        begin = _post("/begin_weight_update", selector="all")
        reply = yield begin
        if says(reply, 400, "already open"):
            # Left by a trainer that died. Ending it restores nothing, but what follows writes every weight anew.
            reply = yield _post("/end_weight_update")
            if not (ack := classify(reply)).done:
                return ack
            reply = yield begin
        if status_of(reply) == 404:
            self._sessions = False
            return evolve(DONE, detail="this server has no weight-update sessions")
        return classify(reply)

    def _transfer(self, request: events.TransferWeights, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if (bucket := request.bucket) is None:
            raise ValueError("TransferWeights needs a bucket")
        flags: dict[str, Any] = {
            # Refused while requests stand in place, after the weights have changed.
            "flush_cache": bucket.last and request.mode is not PauseMode.IN_PLACE,
            "abort_all_requests": False,
            "weight_version": request.label if bucket.last else None,
            "torch_empty_cache": False,
        }
        if bucket.path is not None:
            call = HttpCall(path="/update_weights_from_disk", body={"model_path": bucket.path, **flags})
        elif request.channel is not None:
            body = {**_broadcast(bucket, request.channel.name), **flags}
            call = HttpCall(path="/update_weights_from_distributed", body=body)
        else:
            raise ValueError("a broadcast bucket needs its channel")
        reply = yield call
        if says(reply, 400, _FLUSH_REFUSED):
            self._unlabelled = request.label if bucket.last else None
            return evolve(DONE, detail="the weights changed; the cache was not flushed and the label is missing")
        ack = classify(reply)
        if ack.done:
            self._unlabelled = None
        unsent = isinstance(reply, NoReply) and not reply.sent and not ack.unreachable
        # The handler's own refusals are 400: any other 4xx came before it.
        before = 400 < status_of(reply) < 500 or any(says(reply, 400, words) for words in _BEFORE_LOADING)
        return evolve(ack, untouched=unsent or before)

    def _finish(self, request: events.FinishUpdate, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if request.kind != "broadcast" or not self._sessions:
            return nothing_to_do()
        return simply(_post("/end_weight_update"))

    def _abandon(self, request: events.AbandonUpdate, engine: EngineFacts) -> Steps[Acknowledgement]:
        whole = evolve(DONE, untouched=not engine.touched)
        if request.kind == "disk" or not self._sessions:
            return whole
        reply = yield _post("/end_weight_update", idempotent=True)
        if says(reply, 400, "no weight-update session is open") or status_of(reply) == 404:
            return whole
        ack = classify(reply)
        return whole if ack.done else ack

    def _verify(self, request: events.VerifyWeights, _engine: EngineFacts) -> Steps[Acknowledgement]:
        reply = yield from _either("/model_info", "/get_model_info")
        if not (ack := classify(reply)).done:
            return ack
        label = field_of(reply, "weight_version")
        if label == request.label:
            return ack
        if self._unlabelled == request.label:
            return evolve(ack, detail=f"labelled {label!r} until LabelVersion: the flush was refused")
        return refuse(f"the engine is labelled {label!r}, not {request.label!r}")

    def _flush(self, _request: events.FlushCache, _engine: EngineFacts) -> Steps[Acknowledgement]:
        # Refused while requests stand in place, and answered in plain text.
        return simply(HttpCall(path="/flush_cache", query={"timeout": "0"}, body={}, idempotent=True), json=False)

    def _label(self, request: events.LabelVersion, _engine: EngineFacts) -> Steps[Acknowledgement]:
        if self._unlabelled is None:
            reply = yield from _either("/model_info", "/get_model_info")
            if field_of(reply, "weight_version") == request.label:
                return DONE
        # Left out, abort_all_requests would be true.
        call = _post("/update_weight_version", new_version=request.label, abort_all_requests=False, idempotent=True)
        ack = yield from simply(call)
        if ack.done:
            self._unlabelled = None
        return ack

    # ----------------------------------------------------------------------------------------------------- generation

    def generate(self, request: GenerationRequest, *, engine: str, stream: bool = False) -> Streaming[Segment]:
        """Generate through `/generate`, which takes and returns token ids."""
        body = generate_body(request, stream=stream)
        call = HttpCall(path="/generate", body=body, idempotent=True, lane=Lane.GENERATION, stream=stream)
        reply = yield from ask(call)
        if isinstance(reply, HttpReply) and reply.events:
            return (yield from follow(chunk_of, engine=engine))
        segment = segment_of(generation_body(reply, engine=engine), engine)
        return (yield from hand_on(segment)) if stream else segment

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


def _either(path: str, older: str) -> Steps[Reply]:
    """Ask at `path`, or where older servers answer the same."""
    reply = yield get(path)
    if status_of(reply) == 404:
        reply = yield get(older)
    return reply


def _unknown(offer: Offer, version: Any) -> str | None:
    """Return why a server with these routes cannot be spoken to, or `None`."""
    missing = offer.lacking(*_NEEDED)
    return f"SGLang {version} has no {', '.join(missing)}; use a newer version, such as 0.5.23" if missing else None


def _modes_of(offer: Offer) -> frozenset[PauseMode]:
    """Return the modes that a pause can name; before they had names (sglang#10071), every pause aborted."""
    named = offer.choices("/pause_generation", "mode")
    if named is None:
        return frozenset(_MODES)
    return frozenset(mode for mode, name in _MODES.items() if name in named) | {PauseMode.ABORT}


def _world_size(server: Reply) -> int:
    """Return the ranks that join a broadcast: attention data parallelism shares the tensor-parallel ranks."""

    def size(key: str) -> int:
        value = field_of(server, key)
        return value if isinstance(value, int) and value > 0 else 1

    replicas = 1 if field_of(server, "enable_dp_attention") else size("dp_size")
    return size("tp_size") * size("pp_size") * replicas


def _broadcast(bucket: Bucket, group: str) -> dict[str, Any]:
    return {
        "names": list(bucket.names),
        "dtypes": list(bucket.dtypes),
        "shapes": [list(shape) for shape in bucket.shapes],
        "group_name": group,
        "load_format": "flattened_bucket" if bucket.packed else None,
        "selector": "all",
    }
