"""Start genuine SGLang on a machine without a GPU; takes the arguments of `python -m sglang.launch_server`.

Run it with the interpreter that SGLang is installed for. Server, scheduler, weight updater and model are SGLang's own.
What PyPI does not offer for CPU is put in place of before SGLang is imported, and none of it is called:

- `sgl_kernel`, by the package in `shim/`;
- two operators that torchvision, a CUDA build, wants to describe when it is imported;
- triton, by the stubs that SGLang itself brings for Apple's machines.

It must be a file: SGLang's children are spawned, which runs the top level of this file again in each of them.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
sys.path.insert(0, str(Path(__file__).with_name("shim")))

import torch

_APPLE_ONLY = (
    'if sys.platform != "darwin" or platform.machine() != "arm64":',
    "if not torch.backends.mps.is_available():",
)
_library: Any = torch.library  # untyped
_operators = _library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def stub_triton() -> None:
    """Let SGLang's own stubs take triton's place, without what they do to Apple's torch."""
    path = Path(torch.__file__).parents[1] / "sglang" / "_platform_stubs.py"
    source = path.read_text(encoding="utf-8").split("    mps = torch.mps")[0]
    for condition in _APPLE_ONLY:
        source = source.replace(condition, "if False:")
    stubs = ModuleType("sglang_platform_stubs")
    stubs.__file__ = str(path)
    sys.modules[stubs.__name__] = stubs
    exec(compile(source, path, "exec"), vars(stubs))  # noqa: S102 - SGLang's own file
    stubs.install_platform_stubs()


if importlib.util.find_spec("triton") is None:
    stub_triton()

if __name__ == "__main__":
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
