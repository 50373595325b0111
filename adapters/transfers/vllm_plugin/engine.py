"""The weight-transfer engine that each vLLM worker holds: our receiver under vLLM's base class.

Its duties as vLLM 0.32 has them: join a group at init, put the model's layers aside at start, load what comes at each
update, put processed layers back at finish. The worker itself sees to the order of these calls.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine  # type: ignore[import-not-found]
from vllm.model_executor.model_loader.mtp_validation import (  # type: ignore[import-not-found]
    disable_mtp_completeness_check,
)
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # type: ignore[import-not-found]

from .messages import InitInfo, UpdateInfo
from .receiver import Receiver

if TYPE_CHECKING:
    from vllm.config import VllmConfig  # type: ignore[import-not-found]
    from vllm.config.weight_transfer import WeightTransferConfig  # type: ignore[import-not-found]

__all__ = ["GlooWeightTransferEngine"]

_log = logging.getLogger("vllm.rollout_lifecycle")  # below "vllm", whose handler it uses


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # Any where vLLM is not installed
    """Receives weights in checkpoint format, over gloo or, where the trainer says so, NCCL."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver = Receiver(device)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group, leaving an older one; blocks the worker for at most `timeout_s` seconds."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        _log.info("joined as %s", self._receiver.open(init_info, worker=worker))

    def start_weight_update(self) -> None:
        """Put the model's tensors aside: from here until a finish there is nothing to compute with."""
        self._forget_unfinished()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one update and load it. Whatever fails, the group is left, so that no other rank waits for this one.

        Not the base class's, which ends in a synchronisation that raises where torch has no accelerator.
        """
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._receiver.close()
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive the tensors of one update into the model."""
        with disable_mtp_completeness_check():  # an update need not hold a whole model
            self._receiver.update(update_info, self.model.load_weights)

    def finish_weight_update(self) -> None:
        """Process what was loaded, and put it, and whatever did not come, in place.

        Where that fails the session stays open, and what it could not process is forgotten: the next finish succeeds.
        """
        try:
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            self._forget_unfinished()
            raise

    def _forget_unfinished(self) -> None:
        """Put layers back as they were that a failed update left half loaded.

        vLLM would keep the tensors that such a layer has got, and count them with those of the next update: a refused
        one would be loaded, and refused, again, and a layer that had got half would be processed before it is whole.
        """
        unfinished = [info for layer in self.model.modules() if (info := get_layerwise_info(layer)).can_load()]
        for info in unfinished:
            info.loaded_weights = []
            info.load_numel = 0
        if unfinished:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        self._receiver.close()
