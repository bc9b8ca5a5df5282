# `make demo` and `make test` set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1

.PHONY: setup demo lint test test-all test-flower test-faults test-fuzz bundle test-bundle test-gpu clean

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

# 1,000 seeded kills and faults of disk and network, over every algorithm and engine: make test-faults [KILLS=1000] [SEED=0]
test-faults: setup
	$(BIN)/python -m pytest tests_faults/test_kills.py tests_faults/test_flower.py --kills $(or $(KILLS),1000) --seed $(or $(SEED),0)

# 100,000 mutated inputs for each reader of foreign bytes: make test-fuzz [INPUTS=100000] [SEED=0]
test-fuzz: setup
	$(BIN)/python -m pytest tests_faults/test_fuzz.py --fuzz $(or $(INPUTS),100000) --seed $(or $(SEED),0)

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
