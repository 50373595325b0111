"""Run an embedded engine in this process: `python -m adapters.engines.embedded --dialect sglang --model DIR`."""

from __future__ import annotations

import argparse
import json
import sys

from adapters.engines.embedded.options import DIALECTS, EngineOptions


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and serve until a signal comes; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m adapters.engines.embedded", description=__doc__)
    parser.add_argument("--dialect", required=True, choices=DIALECTS)
    parser.add_argument("--model", required=True, help="directory of a checkpoint in the Hugging Face layout")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0, the default, for a free one")
    parser.add_argument("--options", default="{}", help="fields of EngineOptions as a JSON object")
    chosen = parser.parse_args(arguments)
    try:
        options = EngineOptions(**json.loads(chosen.options))
    except (TypeError, ValueError) as error:
        parser.error(f"--options: {error}")

    from adapters.engines.embedded.server import serve  # noqa: PLC0415 - torch takes seconds; a usage error should not

    try:
        return serve(dialect=chosen.dialect, port=chosen.port, model=chosen.model, host=chosen.host, options=options)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
