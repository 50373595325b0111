"""`python -m lifecycle.explore`: explore, and print what was found. Exits with 1 where a predicate does not hold."""

import argparse
import sys
from collections.abc import Sequence

from lifecycle.states import PauseMode

from .exploring import explore


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore as `arguments` say, print the outcome, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lifecycle.explore", description=__doc__)
    parser.add_argument("--engines", type=int, default=2, help="engines of the fleet (default: 2)")
    parser.add_argument("--faults", type=int, default=3, help="faults at most (default: 3)")
    parser.add_argument("--min-engines", type=int, default=None, help="engines that make a fleet (default: all)")
    parser.add_argument("--buckets", type=int, default=1, help="buckets of a version (default: 1)")
    parser.add_argument("--mode", type=PauseMode, default=PauseMode.ABORT, help="pause mode (default: abort)")
    parser.add_argument(
        "--at-risk-from-begin",
        action="store_true",
        help="weights are at risk as soon as an update is begun, as in vLLM",
    )
    options = parser.parse_args(arguments)
    try:
        found = explore(**vars(options))
    except ValueError as error:
        parser.error(str(error))
    print(found)
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
