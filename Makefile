# `make demo` and `make test` set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1

.PHONY: setup demo lint test test-all test-flower test-faults test-fuzz bundle test-bundle test-gpu docs lock check-lock sbom audit clean

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

# the documentation as a site in build/site; any warning is an error
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

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

# writes deploy/requirements.lock, the container's packages by hash; needs PyPI
lock: setup
	$(BIN)/python tools/lock.py

# fails unless the lock is what constraints.txt leads to, and pip accepts every wheel in it; needs downloads
check-lock: setup
	$(BIN)/python tools/lock.py --check
	$(BIN)/python -m pip download --quiet --no-deps --require-hashes --only-binary :all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		-r deploy/requirements.lock -d build/locked

# tools that look at .venv from outside, so that it holds nothing of theirs
.venv-audit/ready:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0 pip-audit==2.10.1
	touch $@

# what is installed, as CycloneDX JSON: build/sbom.json
sbom: setup .venv-audit/ready
	mkdir -p build
	.venv-audit/bin/cyclonedx-py environment --output-reproducible --output-format JSON --output-file build/sbom.json $(BIN)/python

# known weaknesses of what is pinned; says so where the list of weaknesses cannot be reached
audit: .venv-audit/ready
	$(PYTHON) tools/audit.py .venv-audit/bin/pip-audit constraints.txt

clean:
	rm -rf .venv .venv-audit build dist src/*.egg-info
