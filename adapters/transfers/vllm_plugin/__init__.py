"""A vLLM plugin: workers receive weights in a process group of their own, hosted by the trainer, over gloo or NCCL.

In an engine's environment this package is called `rollout_lifecycle_vllm`, installed from this directory; it imports
nothing of the project. `register` is its entry point; only `engine` needs vLLM.
"""

import logging

from .replies import in_step

__all__ = ["BACKEND", "register"]

BACKEND = "gloo"
"""Name under which a server chooses it: `--weight-transfer-config '{"backend": "gloo"}'`."""

_log = logging.getLogger("vllm.rollout_lifecycle")  # below "vllm", whose handler it uses


def register() -> None:
    """Offer the backend to vLLM, which calls this in each of its processes, in some more than once."""
    try:
        from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found] # noqa: PLC0415
            WeightTransferEngineFactory as Factory,
        )
    except ImportError as error:
        _log.warning("this vLLM has no weight-transfer backends: %s", error)
        return
    try:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # type: ignore[import-not-found] # noqa: PLC0415
    except ImportError as error:
        _log.warning("replies of several workers are not kept in step: %s", error)
    else:
        if not hasattr(MultiprocExecutor.collective_rpc, "keeps_in_step"):
            MultiprocExecutor.collective_rpc = in_step(MultiprocExecutor.collective_rpc)
    if BACKEND not in Factory._registry:  # noqa: SLF001 registering twice raises, and there is no public look
        Factory.register_engine(BACKEND, f"{__name__}.engine", "GlooWeightTransferEngine")
