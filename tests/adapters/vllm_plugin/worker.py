"""A vLLM worker without vLLM: the plugin's receiving half in a process of its own, driven over its standard streams.

Each line it reads is an order, `["open", init_info, worker]`, `["update", update_info]` or `["close"]`; each it prints
says what came of it. The plugin is imported by the name that it has in an engine's environment, where the project is
not: `python -P worker.py DIRECTORY`, the directory holding a link of that name.
"""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch


def main() -> None:
    """Carry out orders until there are none."""
    torch.set_num_threads(1)
    sys.path.insert(0, sys.argv[1])
    messages = import_module("rollout_lifecycle_vllm.messages")  # the path is known only now
    receiver = import_module("rollout_lifecycle_vllm.receiver").Receiver(torch.device("cpu"))
    loaded: dict[str, str] = {}

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "refused":
                raise AssertionError
            loaded[name] = f"{tensor.dtype} {list(tensor.shape)} " + bytes(raw(tensor)).hex()

    for line in sys.stdin:
        order, *arguments = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if order == "open":
                answer["joined"] = receiver.open(messages.InitInfo(**arguments[0]), worker=arguments[1])
            elif order == "update":
                loaded.clear()
                receiver.update(messages.UpdateInfo(**arguments[0]), load)
                answer["loaded"] = loaded
            else:
                receiver.close()
        except (ValueError, RuntimeError) as error:
            answer["error"] = str(error)
        answer["foreign"] = sorted({"lifecycle", "adapters", "vllm"} & set(sys.modules))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def raw(tensor: torch.Tensor) -> list[int]:
    """Return a tensor's bytes."""
    octets: list[int] = tensor.reshape(-1).view(torch.uint8).tolist()
    return octets


if __name__ == "__main__":
    main()
