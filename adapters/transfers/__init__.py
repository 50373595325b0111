"""Weight transfers: how tensors travel from the trainer to the engines.

`Broadcast` sends them through a process group of its own, `Disk` leaves a checkpoint where the engines read it.
`ModuleSource` and `StateDictSource` say which tensors. Importing this package is cheap; torch and safetensors, of the
extra `rollout-lifecycle[torch]`, are imported when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapters.transfers.broadcast import Broadcast
    from adapters.transfers.disk import Disk
    from adapters.transfers.sources import ModuleSource, StateDictSource

__all__ = ["Broadcast", "Disk", "ModuleSource", "StateDictSource"]

_HOMES = {"Broadcast": "broadcast", "Disk": "disk", "ModuleSource": "sources", "StateDictSource": "sources"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
