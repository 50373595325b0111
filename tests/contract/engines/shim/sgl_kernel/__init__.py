"""Stands in for SGLang's compute kernels, whose CPU build is not on PyPI.

SGLang imports some of their names on its way up. A dense Llama in bfloat16 calls none of them, so that every name may
be a function which raises: a model that needs one says so.
"""

from typing import Any, NoReturn


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"the kernel {name} is not installed here; only dense Llamas run without it")

    return missing
