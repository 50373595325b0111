"""Start genuine vLLM on a CPU whose AMX tiles may not be used; takes the arguments of vLLM's API server.

Some virtual machines advertise AMX and trap when vLLM's bfloat16 attention uses it: the worker dies of SIGILL at its
first token. So AVX-512 is what torch, oneDNN and vLLM are told of. Everything else is vLLM's own.

It must be a file: vLLM's children are spawned, which runs the top level of this file again in each of them.
"""

import os
import runpy
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

torch.cpu._is_amx_tile_supported = lambda: False

if __name__ == "__main__":
    sys.argv[0] = "vllm.entrypoints.openai.api_server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
