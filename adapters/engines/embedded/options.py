"""What can be chosen when an embedded engine is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DIALECTS", "EngineOptions"]

DIALECTS = ("sglang", "vllm")


def _token_ids(ids: int | Iterable[int]) -> tuple[int, ...]:
    return (ids,) if isinstance(ids, int) else tuple(ids)


@attrs.frozen(kw_only=True)
class EngineOptions:
    """Configure an embedded engine; every default is what the real servers do, or as near as a small CPU allows.

    Args:
        max_running_requests: How many requests decode together; the others wait in the queue.
        max_context: Longest prompt plus output, in tokens; `None` for the model's `max_position_embeddings`.
        max_prefill_tokens: How many prompt tokens, padding included, one prefill may hold.
        seed: Seed of the sampling of requests that bring none, int ≥ 0; `None` to draw one at every start. SGLang's
            /server_info shows it, by which a restarted server is told from the one before.
        dtype: "float32" or "bfloat16" to run in; `None` for the checkpoint's own.
        num_threads: Threads of torch in the engine's process.
        eos_token_id: Tokens that end a generation, in place of those of config.json; `None` to keep those, `()` for
            none.
        logprobs: "raw" for log-probabilities of the model's own distribution, "scaled" for those after division by the
            temperature. `None` for what the dialect's server does by default: SGLang scaled, vLLM raw. Neither server
            renormalises after top-p or top-k.
        prefix_cache: Whether keys and values of a prompt are kept for the next request with the same prompt, as both
            servers do by default. An update without a flush leaves them stale.
        forward_sleep_seconds: Sleep after every forward pass; SGLang's /slow_down changes it at run time.
        incremental_streaming_output: Whether an event of SGLang's streams holds what is new, instead of all tokens so
            far.
        pause_poll_seconds: SGLang's pause in abort mode looks this often whether the engine is empty, so that it takes
            at least this long whenever something was in flight.
        health_timeout_seconds: How long SGLang's /health waits for a sign of life before it answers 503.
        transfer_timeout_seconds: Deadline of joining a transfer group and of one collective in it, where the request
            names none. The scheduler is blocked for as long.
        weight_transfer_backend: What vLLM was started with in `--weight-transfer-config`; `None` for no such option.
        served_model_name: Name of the model in answers; `None` for its path, as it was given.
        lethal_traps: Whether the process exits where a real server's would. If false, the call that would have killed
            it gets an error, and a vLLM whose weights were lost answers 500 to every request.
        death_seconds: How long a dying engine takes to exit. A real SGLang leaves its callers without an answer for
            about 5; a real vLLM answers them and is gone in less than 0.2.
        exit_with_parent: Whether the process ends when the process that started it is gone.
    """

    max_running_requests: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    max_context: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(2)))
    max_prefill_tokens: int = attrs.field(default=8192, validator=attrs.validators.ge(1))
    seed: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    dtype: str | None = attrs.field(default=None, validator=attrs.validators.in_((None, "float32", "bfloat16")))
    num_threads: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    eos_token_id: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_token_ids))
    logprobs: str | None = attrs.field(default=None, validator=attrs.validators.in_((None, "raw", "scaled")))
    prefix_cache: bool = True
    forward_sleep_seconds: float | None = None
    incremental_streaming_output: bool = False
    pause_poll_seconds: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    health_timeout_seconds: float = attrs.field(default=20.0, validator=attrs.validators.ge(0))
    transfer_timeout_seconds: float = attrs.field(default=300.0, validator=attrs.validators.gt(0))
    weight_transfer_backend: str | None = "gloo"
    served_model_name: str | None = None
    lethal_traps: bool = True
    death_seconds: float = attrs.field(default=0.2, validator=attrs.validators.ge(0))
    exit_with_parent: bool = False
