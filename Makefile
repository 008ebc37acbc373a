# Each target first makes what it needs. A fresh machine needs only Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEV := $(VENV)/.dev
SERVICE := $(VENV)/.service
KERNELS := $(VENV)/.kernels
DOCS := $(VENV)/.docs
# uv installs in a third of pip's time, from the index that pip is configured for. Without uv, pip installs. Modules are
# compiled at their first import, because most modules of torch are never imported.
PIP := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt
UV := $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
install = if [ -x $(BIN)/uv ]; then $(UV) $(1); else false; fi || $(PIP) $(1)
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-frameworks tools soak fuzz lint kernels collected bench docs docs-serve docs-artifact dist dist-check clean
help:
	@echo "make demo    the whole service on this machine, on text that is already there"
	@echo "make test    lint, then every test"
	@echo "make test-frameworks   the tests of make test that run frameworks from their own entry points"
	@echo "make tools   what the tests run and pip has not: prometheus, a headless Chromium, systemd-analyze, curl, ip"
	@echo "make soak    10 minutes (SOAK_MINUTES): thousands of simulated runs, then real processes killed, frozen and slowed,"
	@echo "             against offline golden runs"
	@echo "make fuzz    10 minutes (FUZZ_MINUTES): changed inputs for everything that reads what others say; then 2 minutes"
	@echo "             (FUZZ_LIVE_MINUTES) of changed messages into a broker that runs"
	@echo "make lint    ruff, mypy, import-linter, spelling and prose"
	@echo "make bench   the quick benchmarks; fails where a ratio fell below benchmarks/bounds.yaml"
	@echo "make docs    this documentation as a site, into build/site; docs-serve shows it on port 8000 while you write;"
	@echo "             docs-artifact packs it into build/streampack-docs.tar.gz"
	@echo "make dist    the wheel and the source distribution, in dist/; dist-check installs the wheel into an empty"
	@echo "             environment, and runs the demo there"
	@echo "make clean   remove what the targets made"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	-@$(PIP) uv

$(SERVICE): $(BIN)/python pyproject.toml constraints.txt
	$(call install,-e '.[service]')
	@touch $@

$(DEV): $(BIN)/python pyproject.toml constraints.txt requirements-frameworks.txt requirements-veomni.txt requirements-megatron.txt
	$(call install,-e '.[dev]')
	$(call install,--no-deps -r requirements-frameworks.txt)
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check --no-deps --upgrade \
		--target $(VENV)/veomni -r requirements-veomni.txt
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check --no-deps --upgrade --python-version 3.12 \
		--ignore-requires-python --only-binary :all: --target $(VENV)/megatron -r requirements-megatron.txt
	@touch $@ $(SERVICE) $(DOCS)

$(DOCS): $(BIN)/python pyproject.toml constraints.txt
	$(call install,-e '.[docs]')
	@touch $@ $(SERVICE)

demo: $(SERVICE)
	$(BIN)/streampack demo $(ARGS)

tools: $(BIN)/python
	@.ci/tools

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m tests.prose

# Compile modules and kernels once. Otherwise each of the test processes would compile its own.
kernels: $(KERNELS)
$(KERNELS): $(DEV) $(wildcard $(addsuffix *.py,streampack/core/ streampack/core/*/ streampack/core/*/*/))
	@$(BIN)/python -m compileall -q streampack services
	@$(BIN)/streampack kernels
	@touch $@

# Importing all tests once writes the bytecode of tests, torch and Ray. Otherwise all test processes compile the same
# modules at the same time. Errors here come again when the tests run.
collected: $(KERNELS)
	-@$(BIN)/python -m pytest --collect-only -qq > /dev/null

# CI has two cores. Five workers keep them busy, because tests of processes, pages and alerts wait much of the time. A
# worker takes neighboring tests, which share the fixtures of their module.
test:
	@$(MAKE) --no-print-directory -j 2 $(DEV) tools
	@$(MAKE) --no-print-directory -j 2 lint $(if $(ARGS),kernels,collected)
	$(BIN)/python -m pytest -n 5 --dist worksteal $(ARGS)

test-frameworks: $(KERNELS)
	$(BIN)/python -m pytest -n 2 tests/integration/frameworks $(ARGS)

soak: $(DEV)
	@$(BIN)/python -m tests.soak --minutes $(or $(SOAK_MINUTES),10) $(ARGS)

fuzz: $(DEV)
	@$(BIN)/python -m tests.fuzz --minutes $(or $(FUZZ_MINUTES),10) $(ARGS)
	@$(if $(ARGS),,$(BIN)/python -m tests.fuzz.live --minutes $(or $(FUZZ_LIVE_MINUTES),2))

# Compare ratios of our speed to that of others, in the same run, with the bounds in benchmarks/bounds.yaml.
bench: $(KERNELS)
	@$(BIN)/python benchmarks/guard.py $(ARGS)

# mkdocs.yml makes every warning an error, for example a broken link or anchor.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: $(DOCS)
	@$(MKDOCS) build --quiet
	@echo "build/site/index.html"

docs-serve: $(DOCS)
	@$(MKDOCS) serve --watch streampack --watch services

docs-artifact: docs
	@tar -czf build/streampack-docs.tar.gz --transform 's,^site,streampack-docs,' -C build site
	@echo "build/streampack-docs.tar.gz"

dist: $(DEV)
	rm -rf dist
	$(BIN)/python -m build --outdir dist

# The demo runs in an empty folder, so that it can import only the wheel.
dist-check: dist
	rm -rf build/empty && mkdir -p build/empty
	$(PYTHON) -m venv build/empty/venv
	cd build/empty && env -u PYTHONPATH venv/bin/python -m pip install -q "streampack[service] @ file://$$(ls $(CURDIR)/dist/*.whl)"
	cd build/empty && env -u PYTHONPATH venv/bin/streampack demo $(ARGS)

clean:
	rm -rf $(VENV) dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .fuzz
