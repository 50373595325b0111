"""A receiving rank in a process of its own: `python receiver.py SPEC`, driven over standard input and output.

It prints one line of JSON when it has joined and one for each tensor it received. Each line it reads is a list of
[dtype, shape] to receive next; at the end of its input it leaves.
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

Receive = Callable[[torch.Tensor], None]


def join_as_this_library(spec: dict[str, Any]) -> Receive:
    """Join as an engine of this library does."""
    from adapters.transfers.process_group import connect_group  # noqa: PLC0415 each peer imports only what it uses

    group = connect_group(
        master_address="127.0.0.1",
        master_port=spec["port"],
        rank=spec["rank"],
        world_size=spec["world_size"],
        group_name=spec["name"],
        backend="gloo",
        timeout=20.0,
    )
    return lambda tensor: group.broadcast(tensor, timeout=20.0)


def join_as_sglang(spec: dict[str, Any]) -> Receive:
    """Join with torch's own rendezvous and helper, as SGLang does; no default group exists here."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    rank, size, name, timeout = spec["rank"], spec["world_size"], spec["name"], timedelta(seconds=20)
    url = f"tcp://127.0.0.1:{spec['port']}?rank={rank}&world_size={size}"
    torch_c10d: Any = c10d
    store, rank, size = next(iter(torch_c10d.rendezvous(url, timeout=timeout)))
    store.set_timeout(timeout)
    group, _ = torch_c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), torch_c10d.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    torch_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}

    def receive(tensor: torch.Tensor) -> None:
        work = dist.broadcast(tensor, src=0, group=group, async_op=True)
        assert work is not None
        work.wait()

    return receive


def main() -> None:
    """Join, then receive what is asked for."""
    torch.set_num_threads(1)
    spec = json.loads(sys.argv[1])
    receive = {"library": join_as_this_library, "sglang": join_as_sglang}[spec["maker"]](spec)
    tell({"joined": spec["rank"]})
    for line in sys.stdin:
        for dtype, shape in json.loads(line):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype)).fill_(0)
            receive(tensor)
            tell({"bytes": bytes(tensor.reshape(-1).view(torch.uint8).tolist()[:4096]).hex()})


def tell(fact: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
