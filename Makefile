# Every target is a command you could type yourself; `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
export OPENBLAS_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install decode train test test-all gradcheck lossless parity ablation loc clean

help:  ## this list, and what was found on this machine
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s'|'
	@echo
	@$(PYTHON) --version 2>&1 | sed 's/^/  found: /'
	@test -x $(BIN)/python && $(BIN)/python -m minispec.found || echo "  found: no .venv yet, 'make install' makes it"

install: .venv/ready  ## a virtual environment in .venv with what is needed

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

decode: install  ## held-out prompts, plain and speculative, with the shipped model
	$(BIN)/python decode.py

train: install  ## the demo: train a small model with streams, under 3 minutes
	$(BIN)/python train.py

test: install  ## all tests but the slow ones, about 2 minutes
	$(BIN)/python -m pytest -n auto -m "not slow"

test-all: install  ## all tests
	$(BIN)/python -m pytest

gradcheck: install  ## gradients against finite differences, and the bugs that the check must find
	$(BIN)/python -m pytest tests/test_ops_grad.py tests/test_model_grad.py tests/test_gradcheck_detects.py

lossless: install  ## speculative ids equal plain ids, hundreds of random cases
	$(BIN)/python -m pytest tests/test_lossless.py

parity: install  ## logits and texts against the transformers that is installed; MODELS="DIR ..." adds real models
	@$(BIN)/python -c "import torch, transformers" || { echo "needs the reference tools: $(BIN)/pip install -e '.[dev]'"; exit 1; }
	$(BIN)/python tests/parity.py $(wildcard ../shared/models/stories260K) $(MODELS)

ablation: install  ## the paper's pruning ablation on weights/tiny -> docs/pruning.md
	$(BIN)/python bench.py pruning --per-task 4 --write docs/pruning.md

loc:  ## lines per file
	@wc -l minispec/*.py minispec/drafters/*.py *.py | sort -n

clean:  ## remove the virtual environment, caches and out/
	rm -rf .venv out .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
