"""What every event has."""

from attrs import frozen


@frozen(kw_only=True)
class Event:
    """What every event has. The recorder stamps it; until then it is unnumbered."""

    seq: int = 0
    """Position in this lifecycle's history, from 1, without gaps."""
    at: float = 0.0
    """Seconds, Unix clock."""
    monotonic: float = 0.0
    """Seconds, for differences only."""
    cohort: str = ""
    epoch: int = 0
    """Counts pause-to-continue spans."""
    version: int | None = None
    """The published version at this moment; `None` before the first."""
