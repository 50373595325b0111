"""What users need to test their trainers against a network that fails: a proxy that makes wire faults on purpose."""

from .faults import (
    PASS,
    Answer,
    Delay,
    Drop,
    Fault,
    HalfClose,
    LandLate,
    Silence,
    TruncateBody,
    TruncateJSON,
)
from .proxy import FaultProxy, Seen

__all__ = [
    "PASS",
    "Answer",
    "Delay",
    "Drop",
    "Fault",
    "FaultProxy",
    "HalfClose",
    "LandLate",
    "Seen",
    "Silence",
    "TruncateBody",
    "TruncateJSON",
]
