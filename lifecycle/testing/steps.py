"""What a scripted engine does with one request, instead of just acting on it."""

from attrs import frozen

from lifecycle.values import Acknowledgement


@frozen
class Step:
    """What the engine does with one request, instead of just acting on it."""


@frozen
class Delay(Step):
    """Act after `seconds`."""

    seconds: float


@frozen
class Refuse(Step):
    """Do nothing and say so, like a 4xx."""

    detail: str = "refused by the script"


@frozen
class LoseReply(Step):
    """Act, or not, and let the reply be lost: the caller cannot tell which. What a stream brings, arrives."""

    applied: bool = True


@frozen
class LandLate(Step):
    """Let the reply be lost now, and act when `ScriptedEngine.land()` is called."""


@frozen
class Silence(Step):
    """Never answer."""


@frozen
class Crash(Step):
    """Die on receiving the request. Every later call finds nobody there, until `restart()`."""


@frozen
class Answer(Step):
    """Do nothing and answer this."""

    acknowledgement: Acknowledgement


# ------------------------------------------------------------------------------------------- for generation requests


@frozen
class BreakOff(Step):
    """Cut the connection once `after` tokens were made; the engine lives on."""

    after: int


@frozen
class LoseTokens(Step):
    """Answer with all but the first `kept` tokens left out, though a stream has shown them."""

    kept: int = 0


@frozen
class Contradict(Step):
    """Answer with another first token than the one that was made."""


@frozen
class RepeatChunk(Step):
    """Send the first chunk of the stream twice."""
