# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-engines chaos explore bench soak check clean

demo: $(VENV)/.runtime  ## asynchronous RL against two embedded engines; writes run/
	$(BIN)/rollout-lifecycle demo $(ARGS)

test: $(VENV)/.development  ## every test that needs no foreign engine
	$(BIN)/python -m pytest $(ARGS)

test-engines: $(VENV)/.development  ## the contract suite, also against real vLLM and SGLang, installed where missing
	$(BIN)/python tests/contract/engines/install.py
	$(BIN)/python -m pytest tests/contract --engines $(or $(ENGINES),embedded-sglang,embedded-vllm,sglang,vllm) $(ARGS)

chaos: $(VENV)/.development  ## kill trainers at any moment; no clean engine may stay paused, no dirty one be continued
	$(BIN)/python -m tests.chaos --seeds $(or $(SEEDS),50)

explore: $(VENV)/.development  ## the large closures of the state space: some ten minutes
	$(BIN)/python -m lifecycle.explore --engines 2 --faults 3
	$(BIN)/python -m lifecycle.explore --engines 3 --faults 2

bench: $(VENV)/.development  ## the cost of gate and executor, beside a hand-written one; exit 1 where a target is missed
	$(BIN)/python -m tests.benchmarks $(ARGS)

soak: $(VENV)/.development  ## 200 000 rollouts among faults and cancellations; nothing may leak, the books must balance
	$(BIN)/python -m tests.benchmarks.soak $(ARGS)

check: $(VENV)/.development  ## style, strict types, documentation, diagrams in step with the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m docs.generate --check
	$(BIN)/mkdocs build --strict --quiet --site-dir build/site

clean:
	rm -rf $(VENV) build dist run .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.base: 
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rollout-lifecycle needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --upgrade 'pip>=25.1'
	touch $@

$(VENV)/.runtime: $(VENV)/.base pyproject.toml constraints.txt
	$(PIP) --editable '.[all]'
	touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(PIP) --group dev
	touch $@
