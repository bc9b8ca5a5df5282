# `make demo` and `make test` set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1

.PHONY: setup demo lint test test-all test-flower bundle test-bundle test-gpu clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/effuse run demo

# style and types; seconds once mypy has its cache
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# lint, then all tests but those marked `slow` (long tests that few changes can break, each with its reason)
test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests

# every test of tests/, as CI runs it; ends with a list of the slow tests, their reasons and times
test-all: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

# every algorithm and every fault over a real SuperLink; about ten minutes
test-flower: setup
	$(BIN)/python -m pytest tests_flower

# packs effuse for machines without a network: make bundle PYTHON=3.12 [WITHOUT=torch,numpy,...]
bundle:
	$(MAKE) setup PYTHON=python3
	$(BIN)/python tools/bundle.py $(if $(filter-out python3,$(PYTHON)),--python $(PYTHON)) $(if $(WITHOUT),--without $(WITHOUT))

# packs bundles for two Pythons and runs one; needs downloads
test-bundle: setup
	$(BIN)/python -m pytest tests_bundle

# needs a CUDA GPU; see docs/performance.md
test-gpu:
	python3 -m pytest tests_gpu

clean:
	rm -rf .venv build dist src/*.egg-info
