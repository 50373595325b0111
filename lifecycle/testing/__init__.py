"""What users need to test their trainers: an engine that behaves, or misbehaves, on a script."""

from .scripted import ScriptedEngine
from .steps import (
    Answer,
    BreakOff,
    Contradict,
    Crash,
    Delay,
    LandLate,
    LoseReply,
    LoseTokens,
    Refuse,
    RepeatChunk,
    Silence,
    Step,
)
from .transfer import ScriptedTransfer

__all__ = [
    "Answer",
    "BreakOff",
    "Contradict",
    "Crash",
    "Delay",
    "LandLate",
    "LoseReply",
    "LoseTokens",
    "Refuse",
    "RepeatChunk",
    "ScriptedEngine",
    "ScriptedTransfer",
    "Silence",
    "Step",
]
