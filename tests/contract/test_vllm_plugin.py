"""Our plugin in a real vLLM server, and the library at work with it.

Needs `ROLLOUT_VLLM_PYTHON`: the Python of an environment that holds vLLM and rollout-lifecycle-vllm. Each server takes
half a minute to start and 3 GB.
"""

import functools
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import torch
from attrs import frozen

from adapters.engines import VLLMEngine
from adapters.engines.embedded import CausalLM, LlamaConfig, save
from adapters.transfers import Broadcast, Disk, ModuleSource, StateDictSource
from lifecycle import Generation, GenerationRequest, Lifecycle, PauseMode, State, errors
from lifecycle.ports import Bucket, Member, WeightSource

PYTHON = os.environ.get("ROLLOUT_VLLM_PYTHON")
if not PYTHON:
    pytest.skip("NO REAL vLLM IS TESTED: ROLLOUT_VLLM_PYTHON is not set", allow_module_level=True)

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7, 8]
LLAMA = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    initializer_range=0.1,  # so that the likeliest token leads by more than the noise of bfloat16
    dtype="bfloat16",
)
LONG = 1800
BUCKET = 150_000
"""Seven buckets a publication; query, key and value projections travel in different ones with `atomic=None`."""
GLOO = ("--weight-transfer-config", json.dumps({"backend": "gloo"}))


@pytest.fixture
def anyio_backend() -> str:
    """Servers take long: one event loop is enough."""
    return "asyncio"


# ------------------------------------------------------------------------------------------------------------- servers


def asking(prompt: Sequence[int], count: int) -> dict[str, Any]:
    """Return the body that asks for the likeliest tokens."""
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    return {"token_ids": list(prompt), "sampling_params": sampling}


@frozen(kw_only=True)
class Server:
    """A vLLM server, and what to hold against it."""

    url: str
    workers: int
    directories: tuple[Path, ...]

    def post(self, path: str, body: Any = None, *, timeout: float = 60.0) -> httpx.Response:
        """Call a route on a fresh connection: after a 500 vLLM closes the one it came on."""
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def says(self, path: str, key: str) -> Any:
        """Return one field of an answer."""
        return httpx.get(self.url + path, timeout=60.0).raise_for_status().json()[key]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the likeliest tokens."""
        reply = self.post("/inference/v1/generate", asking(prompt, count))
        tokens: list[int] = reply.raise_for_status().json()["choices"][0]["token_ids"]
        return tokens

    def load(self, index: int) -> None:
        """Let the server load a checkpoint from disk, without this library."""
        self.post("/pause?mode=abort&clear_cache=true").raise_for_status()
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(self.directories[index])}}
        self.post("/collective_rpc", arguments).raise_for_status()
        self.post("/resume").raise_for_status()


@functools.cache
def model(index: int) -> CausalLM:
    """Return the weights of version `index`."""
    return CausalLM(LLAMA, seed=index)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Four checkpoints."""
    root = tmp_path_factory.mktemp("checkpoints")
    return tuple(save(model(index), root / str(index)) for index in range(4))


@contextmanager
def serving(directories: tuple[Path, ...], log: Path, *arguments: str, workers: int = 1) -> Iterator[Server]:
    """Start a server in a process group of its own, and end that."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = f"{PYTHON} -m vllm.entrypoints.openai.api_server --model {directories[0]} --host 127.0.0.1 --port {port}"
    command += f" --max-model-len 2048 --enforce-eager --enable-scale-out --tensor-parallel-size {workers}"
    environment = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if workers > 1:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*shlex.split(command), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await_health(url, process, log)
        yield Server(url=url, workers=workers, directories=directories)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url + "/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail("the server did not start: " + " | ".join(log.read_text().splitlines()[-20:]))


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def vllm(
    request: pytest.FixtureRequest, directories: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with our backend."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(directories, log, *GLOO, workers=request.param) as started:
        yield started


@pytest.fixture(scope="module")
def references(vllm: Server) -> list[list[int]]:
    """What each checkpoint generates, loaded by the server itself; the first is what it was started with."""
    first = vllm.greedy(PROMPT, 60)
    found = []
    for index in range(len(vllm.directories)):
        vllm.load(index)
        found.append(vllm.greedy(PROMPT, 60))
    assert found[0] == first
    assert len({tuple(tokens) for tokens in found}) == len(found)
    return found


# ---------------------------------------------------------------------------------------------------------- the fleet


def broadcast(*, packed: bool = False) -> Broadcast:
    """Return a transfer of several buckets, which cuts through what vLLM fuses."""
    return Broadcast(backend="gloo", packed=packed, bucket_bytes=BUCKET, atomic=None)


@asynccontextmanager
async def running(
    server: Server, transfer: Broadcast, mode: PauseMode = PauseMode.ABORT, *, name: str
) -> AsyncIterator[Lifecycle]:
    """Return a lifecycle that has published version 0 and runs."""
    fleet = [VLLMEngine(server.url)]
    async with Lifecycle(fleet, transfer=transfer, pause_mode=mode, name=name, initial_version=None) as lifecycle:
        await lifecycle.publish(ModuleSource(model(0)), version=0)
        await lifecycle.resume()
        yield lifecycle


async def generate(lifecycle: Lifecycle, first: int, made: dict[int, Generation]) -> None:
    """Generate for long, from a prompt that begins with `first`."""
    prompt = [first, *PROMPT[1:]]
    request = GenerationRequest(input_ids=prompt, max_new_tokens=LONG, temperature=0.0, ignore_eos=True)
    async with lifecycle.admit() as ticket:
        made[first] = await lifecycle.generate(request, ticket=ticket)
        ticket.accept()


async def until_under_way(server: Server) -> None:
    """Wait until whatever was sent before has made some tokens: all requests step together."""
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{server.url}/inference/v1/generate", json=asking(PROMPT, 5), timeout=60.0)
    assert reply.status_code == 200


# ------------------------------------------------------------------------------------------------------------ it works


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("pause", [PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP], ids=lambda pause: pause.value)
async def test_weights_change_under_long_generations(
    vllm: Server, references: list[list[int]], pause: PauseMode, packed: bool
) -> None:
    """The server holds the weights that were published, and every token is of the version it is labelled with."""
    versions = (1,) if pause is PauseMode.WAIT else (1, 2)
    made: dict[int, Generation] = {}
    fleet = running(vllm, broadcast(packed=packed), pause, name=f"{pause.value}-{packed}")
    async with fleet as lifecycle, anyio.create_task_group() as rollouts:
        for first in (5, 6):
            rollouts.start_soon(generate, lifecycle, first, made)
        for version in versions:
            await until_under_way(vllm)
            report = await lifecycle.publish(ModuleSource(model(version)), version=version)
            assert (report.fenced, report.failures, report.state) == ({}, (), State.RUNNING)
            assert report.buckets == 7
            # On a busy machine a generation may have ended before the second.
            assert report.interrupted == 2 or version == 2
    assert vllm.greedy(PROMPT, 60) == references[versions[-1]]
    for first, generation in made.items():
        assert (len(generation.output_ids), generation.finish_reason) == (LONG, "length")
        # Waiting lets a generation end under the version that it began with.
        assert (set(generation.versions) == {0}) is (pause is PauseMode.WAIT)
        assert_exact(vllm, [first, *PROMPT[1:]], generation)


def assert_exact(server: Server, prompt: list[int], generation: Generation) -> None:
    """Repeat each span with the weights of its version, loaded from disk."""
    tokens, start = list(generation.output_ids), 0
    for version, run in itertools.groupby(generation.versions):
        count = len(list(run))
        assert version is not None
        server.load(version)
        assert server.greedy(prompt + tokens[:start], count) == tokens[start : start + count]
        start += count


async def test_an_update_need_not_hold_the_whole_model(vllm: Server, references: list[list[int]]) -> None:
    """A tensor that is not sent stays as it was; in another dtype it is converted."""
    whole = dict(model(1).tensors())
    half = {name: tensor.float() for name, tensor in whole.items() if "layers.1" not in name}
    rest = {name: tensor for name, tensor in whole.items() if "layers.1" in name}
    async with running(vllm, broadcast(), name="halves") as lifecycle:
        await lifecycle.publish(StateDictSource(half), version=1)
        assert vllm.greedy(PROMPT, 60) not in references
        await lifecycle.publish(StateDictSource(rest), version=2)
        assert vllm.greedy(PROMPT, 60) == references[1]


# -------------------------------------------------------------------------------------------------------- it fails well


class Cutting(Broadcast):
    """A trainer whose connections break before a tensor of this name."""

    def __init__(self, name: str, *, bucket_bytes: int = BUCKET) -> None:
        super().__init__(backend="gloo", bucket_bytes=bucket_bytes, atomic=None)
        self._name = name

    async def send(self, bucket: Bucket, *, timeout: float) -> None:
        """Send, until that name."""
        if self._name in bucket.names:
            await self.stop()
        await super().send(bucket, timeout=timeout)


def cut() -> tuple[Broadcast, WeightSource, str]:
    """Return an update whose trainer is cut, and what the engine says of it."""
    reason = r"rank 1 of \d in gloo group \S+ failed while it received 'model\."
    return Cutting("model.norm.weight"), ModuleSource(model(1)), reason


def cut_within_a_layer() -> tuple[Broadcast, WeightSource, str]:
    """Return one that is cut between query and key projection, which are one layer in vLLM."""
    name = "model.layers.1.self_attn.k_proj.weight"
    return Cutting(name, bucket_bytes=1), ModuleSource(model(1)), f"failed while it received '{name}'"


def misshapen() -> tuple[Broadcast, WeightSource, str]:
    """Return an update with a tensor of a wrong shape."""
    weights = dict(model(1).tensors()) | {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}
    return broadcast(), StateDictSource(weights), r"the model refused 'model.norm.weight' \(bfloat16 \[64\]\): \w+"


def misnamed() -> tuple[Broadcast, WeightSource, str]:
    """Return an update with a tensor that the model does not have."""
    weights = {**dict(model(1).tensors()), "model.nope.weight": torch.ones(3)}
    return broadcast(packed=True), StateDictSource(weights), r"the model refused 'model.nope.weight' .*no module or par"


@pytest.mark.parametrize(
    "broken", [cut, cut_within_a_layer, misshapen, misnamed], ids=lambda function: function.__name__
)
async def test_a_failed_update_is_cured_by_the_next(
    vllm: Server, references: list[list[int]], broken: Callable[[], tuple[Broadcast, WeightSource, str]]
) -> None:
    """The engine says why, stays paused and dirty, and the next publication puts it back into service."""
    transfer, source, reason = broken()
    async with running(vllm, broadcast(), name=broken.__name__) as lifecycle:
        with pytest.raises(errors.PublicationFailed) as failed:
            await lifecycle.publish(source, version=1, transfer=transfer)
        assert any(re.search(reason, str(failure)) for failure in failed.value.exceptions), failed.value.exceptions
        assert (lifecycle.state, lifecycle.version) == (State.PAUSED, 0)
        assert (lifecycle.engines[0].dirty, vllm.says("/is_paused", "is_paused")) == (True, True)
        for version in (2, 3):
            report = await lifecycle.publish(ModuleSource(model(version)), version=version)
            assert (report.state, report.fenced, report.failures) == (State.RUNNING, {}, ())
            assert not lifecycle.engines[0].dirty
            assert vllm.greedy(PROMPT, 60) == references[version]
        await transfer.close()


async def opened(server: Server, transfer: Broadcast) -> None:
    """Open a group with the server, by hand."""
    members = [Member(name="e", world_size=server.workers)]
    channel = await transfer.prepare(members, timeout=20.0)
    info = {
        "master_address": channel.master_address,
        "master_port": channel.master_port,
        "rank_offset": 1,
        "world_size": channel.world_size,
        "group_name": channel.name,
        "timeout_s": 1.5,
    }
    async with anyio.create_task_group() as halves, httpx.AsyncClient() as client:
        halves.start_soon(partial(transfer.connect, timeout=20.0))
        reply = await client.post(server.url + "/init_weight_transfer_engine", json={"init_info": info}, timeout=30.0)
        assert reply.status_code == 200, reply.text


async def test_a_silent_trainer_is_given_up_and_a_new_group_needs_no_shutdown(
    vllm: Server, references: list[list[int]]
) -> None:
    """An update that nobody sends ends within timeout_s; joining anew works after that, and while a group stands."""
    first, second, third = broadcast(), broadcast(), broadcast()
    await opened(vllm, first)
    await opened(vllm, second)
    vllm.post("/pause?mode=abort").raise_for_status()
    vllm.post("/start_weight_update").raise_for_status()
    update = {"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[128]]}
    reply = vllm.post("/update_weights", {"update_info": update})
    assert reply.status_code == 500
    assert "failed while it received 'model.norm.weight' (bfloat16 [128]): Timed out" in reply.text
    await opened(vllm, third)
    for transfer in (first, second, third):
        await transfer.close()
    async with running(vllm, broadcast(), name="after-silence"):
        assert vllm.greedy(PROMPT, 60) == references[0]


async def test_nobody_to_join_is_said_within_the_time_given(vllm: Server) -> None:
    """A trainer that is not there, or accepts and keeps silent, blocks the engine for no longer than timeout_s."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = {"nothing listens there": 9, "a rank keeps silent": silent.getsockname()[1]}
        for cause, port in ports.items():
            info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "timeout_s": 1.0}
            info["world_size"] = 1 + vllm.workers
            reply = vllm.post("/init_weight_transfer_engine", {"init_info": info}, timeout=10.0)
            assert reply.status_code == 500
            assert re.search(f"did not meet the others at 127.0.0.1:{port} in 1 s: {cause}", reply.text)


# ------------------------------------------------------------------------------------------------------------ around it


def test_the_plugin_registers_once_and_imports_nothing_of_the_project() -> None:
    """Every process of vLLM calls it, some twice, and the engine's environment has neither of our packages."""
    program = (
        "import sys; from rollout_lifecycle_vllm import register; register(); register()\n"
        "from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as F\n"
        "print(F._registry['gloo']().__name__, sorted({'lifecycle', 'adapters'} & set(sys.modules)))"
    )
    done = subprocess.run([str(PYTHON), "-P", "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.splitlines()[-1] == "GlooWeightTransferEngine []"


async def test_a_server_with_a_backend_of_vllms_own_says_what_it_takes(
    directories: tuple[Path, ...], tmp_path: Path
) -> None:
    """A broadcast is refused in one sentence before any weight is touched; a disk publication goes on."""
    nccl = ("--weight-transfer-config", json.dumps({"backend": "nccl"}))
    with serving(directories, tmp_path / "log", *nccl) as server:
        async with Lifecycle([VLLMEngine(server.url)], transfer=broadcast(), initial_version=None) as lifecycle:
            await lifecycle.publish(ModuleSource(model(1)), version=1, transfer=Disk(tmp_path / "weights"))
            await lifecycle.resume()
            with pytest.raises(errors.PublicationFailed) as refused:
                await lifecycle.publish(ModuleSource(model(2)), version=2)
            sentence = "weight-transfer backend 'nccl' does not meet a Broadcast(): publish through Disk(), or install"
            assert any(sentence in str(failure) for failure in refused.value.exceptions)
            assert (lifecycle.state, lifecycle.version, lifecycle.engines[0].dirty) == (State.RUNNING, 1, False)
