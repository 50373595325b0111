"""`python -m adapters` is `rollout-lifecycle`."""

import sys

from adapters.frontends.cli import main

if __name__ == "__main__":
    sys.exit(main())
