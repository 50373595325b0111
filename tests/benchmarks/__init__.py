"""How fast it is, and whether it lasts. Benchmarks are separate from the tests: `python -m tests.benchmarks`."""
