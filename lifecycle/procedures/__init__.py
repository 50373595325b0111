"""How each request of the transition table is performed: one procedure a request.

A procedure raises when its transition must not go on. Those that roll forward do not raise for an engine: they fence
it, and keep the reason in `Operation.failures`.
"""

from .attaching import Attaching
from .context import Context, Operation, Procedure
from .pausing import Pausing
from .publishing import Publishing

__all__ = ["Context", "Operation", "Procedure", "procedures"]


def procedures(context: Context) -> dict[type, Procedure]:
    """Return the procedure of every request that the transition table names."""
    pausing = Pausing(context)
    return {**pausing.procedures(), **Attaching(context, pausing).procedures(), **Publishing(context).procedures()}
