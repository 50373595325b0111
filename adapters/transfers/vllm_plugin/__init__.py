"""A vLLM plugin: workers receive weights in a process group of their own, hosted by the trainer, over gloo or NCCL.

In an engine's environment this package is called `rollout_lifecycle_vllm`, installed from this directory; it imports
nothing of the project. `register` is its entry point; only `engine` needs vLLM.
"""

import logging

__all__ = ["BACKEND", "register"]

BACKEND = "gloo"
"""Name under which a server chooses it: `--weight-transfer-config '{"backend": "gloo"}'`."""


def register() -> None:
    """Offer the backend to vLLM, which calls this in each of its processes, in some more than once."""
    try:
        from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found] # noqa: PLC0415
            WeightTransferEngineFactory as Factory,
        )
    except ImportError as error:
        logging.getLogger("vllm.rollout_lifecycle").warning("this vLLM has no weight-transfer backends: %s", error)
        return
    if BACKEND not in Factory._registry:  # noqa: SLF001 registering twice raises, and there is no public look
        Factory.register_engine(BACKEND, f"{__name__}.engine", "GlooWeightTransferEngine")
