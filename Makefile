# Two commands do all on a machine with Python 3.11+ and git: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?= models/recurra-tiny
PROMPT ?= The os.path.join function

.PHONY: help demo chat serve test test-gpu test-slow lint format types contracts check clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Torch goes in by itself, at the pinned version, so that no other package pulls a different build.
$(VENV)/.user: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[serve]'
	@touch $@

$(VENV)/.dev: $(VENV)/.user
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,gpu]'
	@touch $@

demo: $(VENV)/.user ## install, then continue a prompt with the shipped model
	$(BIN)/recurra generate $(MODEL) --prompt "$(PROMPT)" --echo --max-tokens 96 --temperature 0.7 --seed 1

chat: $(VENV)/.user ## talk to the shipped model
	$(BIN)/recurra chat $(MODEL)

serve: $(VENV)/.user ## serve the shipped model on http://127.0.0.1:8000
	$(BIN)/recurra serve $(MODEL)

test: $(VENV)/.dev ## all fast tests (CPU), then the Triton kernels in Triton's interpreter
	VENV=$(VENV) scripts/test

test-gpu: $(VENV)/.dev ## tests that need a CUDA GPU
	$(BIN)/python -m pytest -m gpu

test-slow: $(VENV)/.dev ## soak tests, minutes long
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev ## format check and lint
	VENV=$(VENV) scripts/lint

format: $(VENV)/.dev ## write the formatting
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

types: $(VENV)/.dev ## mypy --strict on src
	$(BIN)/mypy

contracts: $(VENV)/.dev ## layers of the architecture
	$(BIN)/lint-imports

check: lint types contracts test ## everything CI runs

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
