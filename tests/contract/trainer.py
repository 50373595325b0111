"""The trainer's half of a gloo group of two, and what it sends."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from adapters.transfers.process_group import Group, host_group
from adapters.transfers.rendezvous import Rendezvous

from .wire import GROUP, PACKED_BYTES, TRANSFER_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from .flights import Answer
    from .wire import Named, Wire

__all__ = ["Trainer", "training"]


class Trainer:
    """Rank 0, with the engine as rank 1.

    Args:
        wire: The engine.
        group: The group, built.
        packed: Whether tensors travel together, as bytes.
    """

    def __init__(self, wire: Wire, group: Group, *, packed: bool) -> None:
        self._wire, self._group, self._packed = wire, group, packed
        self._seconds = min(TRANSFER_SECONDS, wire.patience)

    def update(self, tensors: Named) -> Answer:
        """Announce the tensors, send them, and return what the engine answers."""
        flight = self._wire.announce(tensors, packed=self._packed)
        self.send(tensors)
        return flight.answer()

    def send(self, tensors: Named) -> None:
        """Send the tensors."""
        for payload in self._payloads(tensors):
            self._group.broadcast(payload, timeout=self._seconds)

    def die(self) -> None:
        """End all connections, as the end of the process would."""
        self._group.cut()
        self._group.close()

    def _payloads(self, tensors: Named) -> Iterator[Tensor]:
        if not self._packed:
            yield from (tensor.detach() for _, tensor in tensors)
            return
        limit = PACKED_BYTES if self._wire.dialect == "vllm" else None
        pieces: list[Tensor] = []
        for _, tensor in tensors:
            pieces.append(tensor.detach().contiguous().flatten().view(torch.uint8))
            if limit is not None and sum(piece.nbytes for piece in pieces) > limit:
                yield torch.cat(pieces)
                pieces = []
        if pieces:
            yield torch.cat(pieces)


@contextmanager
def training(wire: Wire, *, packed: bool = False) -> Iterator[Trainer]:
    """Host a group, let the engine join it, and be its trainer; it ends with the block."""
    seconds = min(TRANSFER_SECONDS, wire.patience)
    rendezvous = Rendezvous("127.0.0.1", timeout=seconds)
    try:
        flight = wire.join(rendezvous.port, packed=packed)
        group = host_group(rendezvous, world_size=2, group_name=GROUP, backend="gloo", timeout=seconds)
        trainer = Trainer(wire, group, packed=packed)
        try:
            assert flight.answer().status == 200, flight.answer()
            yield trainer
        finally:
            trainer.die()
    finally:
        rendezvous.close()
