"""Replies as the proxy sends them: the engine's own, canned ones, and cut ones."""

import json

import h11
from attrs import frozen

from .faults import PASS, Answer, Fault, TruncateBody, TruncateJSON


@frozen
class Reply:
    """A whole reply."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def canned(answer: Answer) -> Reply:
    """Return what is answered instead of the engine."""
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    if answer.body is None or isinstance(answer.body, str | bytes):
        body = answer.body or b""
        return Reply(answer.status, headers, body.encode() if isinstance(body, str) else body)
    headers.append((b"content-type", b"application/json"))
    return Reply(answer.status, headers, json.dumps(answer.body).encode())


def message(reply: Reply, fault: Fault = PASS) -> list[h11.Event]:
    """Return a reply as h11 takes it, cut as `fault` says."""
    body = reply.body[: fault.keep] if isinstance(fault, TruncateBody | TruncateJSON) else reply.body
    announced = len(reply.body if isinstance(fault, TruncateBody) else body)
    head = h11.Response(
        status_code=reply.status, headers=[*reply.headers, (b"content-length", str(announced).encode())]
    )
    end = [] if isinstance(fault, TruncateBody) else [h11.EndOfMessage()]
    return [head, h11.Data(data=body), *end]
