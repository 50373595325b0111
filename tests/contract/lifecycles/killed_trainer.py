"""A trainer that pauses an engine and waits to be killed: `python killed_trainer.py URL DIALECT MODE JOURNAL`."""

import sys

import anyio

from adapters.engines import SGLangEngine, VLLMEngine
from lifecycle import Lifecycle, PauseMode

ENGINES = {"sglang": SGLangEngine, "vllm": VLLMEngine}
PAUSED = "paused"


async def main(url: str, dialect: str, mode: str, journal: str) -> None:
    """Pause, say so, and do nothing more.

    Cancellation: the engine is continued.
    """
    engine = ENGINES[dialect](url, name="engine")
    async with Lifecycle([engine], name="contract", journal=journal) as lifecycle:
        await lifecycle.suspend()
        await lifecycle.pause_generation(PauseMode(mode))
        print(PAUSED, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    url, dialect, mode, journal = sys.argv[1:]
    anyio.run(main, url, dialect, mode, journal)
