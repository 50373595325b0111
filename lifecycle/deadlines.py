"""How long each kind of request may take. Read when a request goes out, so that a run can change them."""

from typing import Any

from attrs import define, field

from . import events as e


def _positive(_: object, attribute: Any, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be a positive number of seconds, got {value}")


def _seconds(default: float) -> Any:
    return field(default=default, validator=_positive)


@define(kw_only=True)
class Deadlines:
    """Seconds, by what is waited for. Each covers every retry of its request."""

    attach: float = _seconds(60.0)
    """All engines together becoming ready."""
    probe: float = _seconds(10.0)
    drain: float = _seconds(300.0)
    """Generation requests in flight ending by themselves before a WAIT pause."""
    abort: float = _seconds(10.0)
    """An abort, and after it the aborted requests coming back."""
    pause: float = _seconds(30.0)
    resume: float = _seconds(10.0)
    """A continue: for this long it is retried until it is acknowledged; then the engine is fenced."""
    open_transfer: float = _seconds(60.0)
    begin: float = _seconds(30.0)
    transfer: float = _seconds(300.0)
    """One bucket."""
    finish: float = _seconds(120.0)
    verify: float = _seconds(30.0)
    flush: float = _seconds(30.0)
    label: float = _seconds(10.0)
    canary: float = _seconds(30.0)
    abandon: float = _seconds(10.0)
    close_transfer: float = _seconds(10.0)
    generate: float = _seconds(1800.0)
    """One generation request, from sending it to its last token."""
    operation: float = _seconds(3600.0)
    """A whole operation with its clean-up, such as one `publish()`. Near its end each request has less than its own
    deadline, and after it, while cleaning up, `grace`. Time spent in the weight source is not ours to limit."""
    grace: float = _seconds(5.0)
    """How much longer engines are waited for once the trainer's half of a transfer has failed, or the reverse; and how
    long a bucket, or the opening of a channel, may still take once the caller was cancelled."""

    def of(self, request: type[e.Request]) -> float:
        """Return the seconds that a request of this kind may take."""
        return float(getattr(self, _FIELDS[request]))


_FIELDS: dict[type[e.Request], str] = {
    e.ProbeEngine: "probe",
    e.AbortGeneration: "abort",
    e.PauseGeneration: "pause",
    e.ContinueGeneration: "resume",
    e.ProvePaused: "probe",
    e.OpenTransfer: "open_transfer",
    e.BeginUpdate: "begin",
    e.TransferWeights: "transfer",
    e.FinishUpdate: "finish",
    e.VerifyWeights: "verify",
    e.FlushCache: "flush",
    e.LabelVersion: "label",
    e.Canary: "canary",
    e.AbandonUpdate: "abandon",
    e.CloseTransfer: "close_transfer",
}
