"""What users need to test their trainers: an engine that behaves, or misbehaves, on a script."""

from .scripted import Answer, Crash, Delay, LandLate, LoseReply, Refuse, ScriptedEngine, Silence, Step
from .transfer import ScriptedTransfer

__all__ = [
    "Answer",
    "Crash",
    "Delay",
    "LandLate",
    "LoseReply",
    "Refuse",
    "ScriptedEngine",
    "ScriptedTransfer",
    "Silence",
    "Step",
]
