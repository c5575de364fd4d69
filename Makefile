# Each target sets up its own virtual environment, .venv, on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python tools/install.py -c constraints.txt
MODEL := smollm2-135m-instruct

# Three files at a time where there is memory for them, 13 GB, within the limits of control groups:
# much of a server's test is waiting.
# Threads that wait for their team in a busy loop would keep the other files' from the cores, and so
# would BLAS with a thread for each core in all. Files go in the order of folders, which ends with
# short ones.
MEMORY = from twolane.common.resources import total_memory; print(2 + (total_memory() > 15e9))
WORKERS = $(shell $(BIN)/python -c '$(MEMORY)')
PYTEST = OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# What `make check` runs: the folders without a server, a real model or compiled kernels.
FAST := $(addprefix tests/,common engine estimate frontend lanes results sim systems workload test_docs.py test_imports.py test_readability.py)

# Tests start hundreds of processes: what they import is compiled once, whatever the caller prefers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve check fast test unit test-all test-clients check-deploy test-gpu test-fleet docs pictures lint package check-root lock audit clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.ready ## serve a real model and replay a small load: both lanes at once
	$(BIN)/python examples/demo.py

serve: $(VENV)/.ready ## serve a small model at localhost:8000
	$(BIN)/twolane serve $(MODEL)

# Types are checked beside the tests: both together leave fewer cores idle.
test: $(VENV)/.ready-dev ## lint, types and all tests: before you send a change
	$(MAKE) --jobs=2 lint unit

check: $(VENV)/.ready-dev ## lint, types and the fast tests: while you work
	$(MAKE) --jobs=2 lint fast

unit: $(VENV)/.ready-dev ## all tests
	$(PYTEST)

fast: $(VENV)/.ready-dev ## the tests without a server, a real model or compiled kernels
	$(PYTEST) $(FAST)

test-all: lint ## lint, types and the long form of every test
	$(BIN)/python -m pytest --full

test-gpu: $(VENV)/.ready-dev ## the tests of lanes and kernels on a GPU
	$(BIN)/python -m pytest tests/gpu tests/kernels

# Needs twolane[ray].
test-fleet: $(VENV)/.ready-dev ## the tests of several servers; needs twolane[ray]
	$(BIN)/python -m pytest --full tests/fleet tests/router

# Real clients in environments of their own, those of JavaScript and agents of terminals by npm.
test-clients: $(VENV)/.ready-dev .clients/.ready ## real clients in environments of their own
	$(BIN)/python -m tests.clients.run .clients

.clients/.ready: $(wildcard tests/clients/requirements/*.txt)
	for file in $^; do \
	    made=.clients/$$(basename $$file .txt); \
	    $(PYTHON) -m venv $$made && $$made/bin/python -m pip install --quiet -r $$file || exit 1; \
	done
	npm install --silent --prefix .clients @openai/codex@0.171.0 openai@6.49.0 zod@4.6.7 \
	    ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 @langchain/openai@1.5.8 @langchain/core@1 \
	    @anthropic-ai/claude-code@2.1.197 llamaindex@0.12.1 @llamaindex/openai@0.4.23 \
	    @llamaindex/workflow@1.1.25 @qwen-code/qwen-code@0.15.10 opencode-ai@1.18.33 \
	    @mariozechner/pi-coding-agent@0.73.1 @continuedev/cli@1.5.47
	touch $@

# Charts, manifests, container files and the unit by their own tools; what cannot be installed is
# named and skipped.
check-deploy: .deploy/.ready ## charts, manifests and container files by their tools
	.deploy/bin/python deploy/check.py

.deploy/.ready: deploy/requirements.txt
	$(PYTHON) -m venv .deploy
	.deploy/bin/python tools/install.py -r $< || grep -v '^#' $< | while read -r package; do \
	    .deploy/bin/python -m pip install --quiet "$$package" || echo "skipped: $$package"; done
	touch $@

# The documentation site, in site/; strict: a broken link or anchor is an error.
docs: .docs/.ready ## build the site of the documentation
	NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build

.docs/.ready: docs/requirements.txt
	$(PYTHON) -m venv .docs
	.docs/bin/python -m pip install --quiet -r $<
	touch $@

# Chromium (Debian: chromium) draws what a real server answered; tools/pictures.py says how to record.
pictures: $(VENV)/.ready-dev ## draw the dashboard's pictures of the documentation
	$(BIN)/python tools/pictures.py draw

lint: $(VENV)/.ready-dev ## style, types and bounds on readability
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tools/readability.py --check

# Builds what would be published, from the files of this checkout, into dist/, and tries it.
package: .package/.ready ## build wheel and source archive and check them
	rm -rf dist
	.package/bin/python -m build --quiet
	.package/bin/python -m twine check --strict dist/*
	.package/bin/python deploy/package.py

# Needs root and debootstrap: the CPU image's steps where no container runtime is at hand.
check-root: ## install the wheel of `make package` in a bare Debian and ask its server
	$(PYTHON) deploy/debian_root.py

# Writes the locks of the images anew.
lock: .package/.ready ## renew the pinned versions
	UV=.package/bin/uv deploy/container/lock.sh

# Known vulnerabilities of what the images install; it fails where the index has no such data.
audit: .package/.ready ## look for known faults in the pinned versions
	.package/bin/pip-audit --strict --no-deps --disable-pip -r deploy/container/cpu.lock
	.package/bin/pip-audit --strict --no-deps --disable-pip -r deploy/container/cuda.lock

.package/.ready: deploy/package-requirements.txt
	$(PYTHON) -m venv .package
	.package/bin/python -m pip install --quiet -r $<
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .[bench]
	touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .[bench,otel,dev]
	touch $@ $(VENV)/.ready

clean: ## remove the environments and what was built
	rm -rf $(VENV) .deploy .docs .package .root dist site
