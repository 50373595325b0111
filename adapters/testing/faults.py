"""The faults that a `FaultProxy` makes: plain values, one for each request that shall meet one.

`applied` says in all of them whether the engine gets the request before the fault happens. It is what makes a lost
reply worth testing: the client cannot tell the two apart.
"""

from collections.abc import Mapping
from typing import Any

import anyio
from attrs import field, frozen


@frozen
class Fault:
    """What happens to one request. This one: nothing does."""

    applied: bool = field(default=True, kw_only=True)
    """Whether the request is forwarded to the engine."""


PASS = Fault()
"""No fault: to let an occurrence pass before the one that fails."""


@frozen
class Delay(Fault):
    """Wait, then go on as if nothing had been.

    Args:
        until: Wait until this event is set; `None`: for `seconds`.
        seconds: How long to wait. Ignored where there is an event.
        applied: Wait before replying, with the request carried out, instead of before forwarding it.
    """

    until: anyio.Event | None = None
    seconds: float = 0.0
    applied: bool = field(default=False, kw_only=True)


@frozen
class Drop(Fault):
    """Close the connection without a reply.

    Args:
        applied: Forward the request first, and throw the engine's reply away.
        reset: Close with a RST, as the kernel does for a process that was killed.
    """

    applied: bool = field(default=False, kw_only=True)
    reset: bool = field(default=False, kw_only=True)


@frozen
class HalfClose(Fault):
    """Close the sending half only: the client reads the end of the stream, and what it still sends is read."""

    applied: bool = field(default=False, kw_only=True)


@frozen
class Silence(Fault):
    """Accept the request and never answer: until the client hangs up, or the proxy ends."""

    applied: bool = field(default=False, kw_only=True)


@frozen
class TruncateBody(Fault):
    """Pass the engine's reply on, but close after the first `keep` bytes of the body that its head announces."""

    keep: int = 1


@frozen
class TruncateJSON(Fault):
    """Pass the engine's reply on, with only the first `keep` bytes of its body, and a head that announces just those.

    So it is whole HTTP around broken JSON, as from a server that died while it wrote.
    """

    keep: int = 1


@frozen
class Answer(Fault):
    """Answer this instead of the engine.

    Args:
        status: HTTP status.
        body: Sent as it is where it is `str` or `bytes`, else as JSON. `None`: no body.
        headers: Further headers.
        applied: Forward the request first, and answer this instead of the engine's reply, as a gateway does that gave
            up waiting.
    """

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(factory=dict)
    applied: bool = field(default=False, kw_only=True)


@frozen
class LandLate(Fault):
    """Close the connection without a reply now, and forward the request once `until` is set."""

    until: anyio.Event
    applied: bool = field(default=False, kw_only=True)
