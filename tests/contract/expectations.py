"""Where the engines differ: a table for each question, by dialect."""

from __future__ import annotations

import attrs

__all__ = ["MODES", "Pause"]


@attrs.frozen(kw_only=True)
class Pause:
    """What a pause mode does.

    Args:
        in_flight: What becomes of a request that runs: "aborted" at once with its tokens so far, "finished" before the
            pause is answered, or "kept" until the engine continues.
        flushes: Whether the cache can be dropped during the pause, a request having been in flight.
    """

    in_flight: str
    flushes: bool = True


MODES = {
    "sglang": {
        "abort": Pause(in_flight="aborted"),
        "retract": Pause(in_flight="kept"),
        "in_place": Pause(in_flight="kept", flushes=False),
    },
    "vllm": {
        "abort": Pause(in_flight="aborted"),
        "wait": Pause(in_flight="finished"),
        "keep": Pause(in_flight="kept"),
    },
}
