# Each target first creates what it needs. You need Linux, Python 3.11 or newer, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEV := $(VENV)/.dev
SERVICE := $(VENV)/.service
KERNELS := $(VENV)/.kernels
DOCS := $(VENV)/.docs
# uv needs a third of pip's time, and reads the same package index. Without uv, pip installs. --no-compile leaves modules
# to be compiled at their first import, because most modules of torch are never imported.
PIP := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt
UV := $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
install = if [ -x $(BIN)/uv ]; then $(UV) $(1); else false; fi || $(PIP) $(1)
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-frameworks tools soak fuzz lint kernels collected bench docs docs-serve docs-artifact dist dist-check clean
help:
	@echo "make demo      run the whole service on this machine, on text that is already there"
	@echo "make test      lint, then run every test; ARGS=\"tests/core -k merge\" runs some of them"
	@echo "make test-frameworks   run the tests that start other frameworks from their own entry points"
	@echo "make tools     install programs that tests need and pip does not have: prometheus, a headless Chromium,"
	@echo "               systemd-analyze, curl, ip"
	@echo "make lint      run ruff, mypy, import-linter, and the checks of spelling and prose"
	@echo "make soak      kill, freeze and slow down processes for 10 minutes (SOAK_MINUTES=2), and compare every step with"
	@echo "               an offline run"
	@echo "make fuzz      feed changed inputs to everything that reads foreign bytes for 10 minutes (FUZZ_MINUTES=2), then"
	@echo "               changed messages to a running broker for 2 minutes (FUZZ_LIVE_MINUTES=60)"
	@echo "make bench     run the quick benchmarks; fails if a ratio is below benchmarks/bounds.yaml"
	@echo "make docs      build the documentation site into build/site"
	@echo "make docs-serve      show the site on port 8000 while you write"
	@echo "make docs-artifact   pack the site into build/streampack-docs.tar.gz"
	@echo "make dist      build the wheel and the source distribution into dist/"
	@echo "make dist-check      install the wheel into an empty environment, and run the demo there"
	@echo "make clean     remove everything that these targets made"

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

# Import all tests once, which writes the bytecode of tests, torch and Ray. Otherwise all test processes compile the same
# modules at the same time. Errors are ignored here, because the tests will show them.
collected: $(KERNELS)
	-@$(BIN)/python -m pytest --collect-only -qq > /dev/null

# CI has two cores. Five workers keep them busy, because tests of processes, pages and alerts often wait. Each worker takes
# neighboring tests, which share the fixtures of their module.
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

# Measure streampack and other programs in one run. Compare the ratios with benchmarks/bounds.yaml.
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
