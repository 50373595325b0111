"""A plain HTTP client for the tests, and the trainer's half of a gloo group."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import httpx
import torch

from adapters.transfers.process_group import Group, host_group
from adapters.transfers.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from adapters.engines.embedded import CausalLM

PROMPT = [5, 6, 7, 8]
TYPE = {"Content-Type": "application/json"}


class Client:
    """Calls that block, and calls that run in a thread until their answer is asked for."""

    def __init__(self, url: str) -> None:
        self.url = url
        # A connection per call, since vLLM closes the one that it has answered with 500, and says nothing.
        close = {"Connection": "close", **TYPE}
        # Nothing here is encrypted, and loading certificate authorities would take longer than most tests.
        self._http = httpx.Client(base_url=url, timeout=30.0, trust_env=False, verify=False, headers=close)  # noqa: S501
        self._threads = ThreadPoolExecutor(16)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        # An answer that never comes must not keep a failed test from ending: the server goes next, and cuts it.
        self._threads.shutdown(wait=False, cancel_futures=True)

    def get(self, path: str, **query: Any) -> httpx.Response:
        """GET; `query` becomes the query string."""
        return self._http.get(path, params=query)

    def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None, **query: Any) -> httpx.Response:
        """POST a JSON body, or none at all if it is `None`."""
        content = b"" if body is None else json.dumps(body).encode()
        return self._http.post(path, content=content, headers=headers, params=query)

    def ok(self, path: str, body: Any = None, **query: Any) -> Any:
        """POST, expect 200, and return what came, parsed if it is JSON."""
        response = self.post(path, body, **query)
        assert response.status_code == 200, response.text
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    def later(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, **query: Any
    ) -> Future[httpx.Response]:
        """POST in a thread."""
        return self._threads.submit(lambda: self.post(path, body, headers, **query))

    def begin(self, path: str, body: Any) -> Future[int]:
        """POST, and return when the server has taken the request up; its status comes later."""
        url = httpx.URL(self.url)
        connection = http.client.HTTPConnection(url.host, url.port or 0, timeout=30)
        connection.request("POST", path, json.dumps(body), TYPE)

        def status() -> int:
            try:
                return connection.getresponse().status
            finally:
                connection.close()

        # Answered calls that were sent later prove that the loop has read this one.
        for _ in range(3):
            self.get("/openapi.json")
        return self._threads.submit(status)

    def give_up(self, path: str, body: Any) -> None:
        """POST and hang up without an answer, once the server has taken the request up."""
        url = httpx.URL(self.url)
        connection = http.client.HTTPConnection(url.host, url.port or 0, timeout=30)
        connection.request("POST", path, json.dumps(body), TYPE)
        for _ in range(3):
            self.get("/openapi.json")
        connection.close()

    def run(self, function: Callable[[], Any]) -> Future[Any]:
        """Run something else in a thread."""
        return self._threads.submit(function)

    @contextmanager
    def stream(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Iterator[Iterator[Any]]:
        """POST, and yield the events as they come, parsed; the last is "[DONE]". Leaving early disconnects."""
        with self._http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
            assert response.status_code == 200
            yield (
                json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]"
                for line in response.iter_lines()
                if line.startswith("data: ")
            )


def until(condition: Callable[[], bool]) -> None:
    """Ask again and again until it is so; fail where it does not come about."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline


def greedy(model: CausalLM, prompt: list[int], count: int) -> list[int]:
    """The `count` most probable tokens after `prompt`, one after the other, without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@contextmanager
def trainer_group(join: Callable[[int], Future[httpx.Response]], name: str = "g") -> Iterator[Group]:
    """Host a group of two as rank 0; `join` gets the port and asks the engine to come in."""
    rendezvous = Rendezvous("127.0.0.1", timeout=10.0)
    answer = join(rendezvous.port)
    group = host_group(rendezvous, world_size=2, group_name=name, backend="gloo", timeout=10.0)
    try:
        assert answer.result(10).status_code == 200, answer.result().text
        yield group
    finally:
        group.cut()
        group.close()
        rendezvous.close()


def describe(model: CausalLM) -> tuple[list[str], list[str], list[list[int]]]:
    """Names, dtypes and shapes of the weights, in order."""
    tensors = list(model.tensors())
    return (
        [name for name, _ in tensors],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        [list(tensor.shape) for _, tensor in tensors],
    )
