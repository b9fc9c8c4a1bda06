PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install demo test test-long lint docs bench-peers clean

help: ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(VENV)/installed ## the virtual environment in .venv, with everything the other targets need

$(VENV)/installed: pyproject.toml constraints.txt scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh $(VENV)
	@touch $@

demo: install ## tune kernels for this machine, generate with the winner, compare it (minutes)
	scripts/demo.sh

lint: install ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy

# Two processes of tests at a time, and OpenMP's threads wait for each other asleep: they would spin on the other's core.
test: lint ## lint and every test that is quick
	OMP_WAIT_POLICY=passive $(BIN)/pytest -m "not long" -n 2 --dist worksteal

test-long: lint ## every test
	$(BIN)/pytest

docs: install ## docs/cli.md from --help
	$(BIN)/python scripts/gen_cli_docs.py

bench-peers: .venv-peers/installed ## CPU attention beside torch SDPA and vLLM's kernel, in .venv-peers (about 3 GB, and hours)
	.venv-peers/bin/python benchmarks/attention_cpu.py

.venv-peers/installed: scripts/install_peers.sh
	PYTHON=$(PYTHON) scripts/install_peers.sh .venv-peers
	@touch $@

clean: ## removes what the targets above made here (not your kernel cache)
	rm -rf $(VENV) .venv-peers .mypy_cache .ruff_cache .hypothesis
