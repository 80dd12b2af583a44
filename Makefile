# Everything a fresh machine needs: Python 3.11 or newer. `make serve` and `make test` set up what they use.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
# Entry points are read at install: a changed manifest means installing again.
MANIFESTS := $(wildcard core/pyproject.toml plugins/*/*/pyproject.toml)
DISTRIBUTIONS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/*/pyproject.toml))
SOURCES := core/src core/tests plugins tests benchmarks examples

# The first interpreter that is new enough and really runs (version managers leave launchers that do not).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

# Said where there is an environment already that has to change.
AGAIN = if [ -d $(STAMPS) ]; then echo "bringing $(VENV) up to date …"; fi

CONFIG ?=
ARGS ?=

.PHONY: help serve test test-full check format bench clean

help: ## What there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then echo "make: Python 3.11 or newer is needed and was not found; set PYTHON=/path/to/python" >&2; exit 2; fi
	@echo "setting up $(VENV) …"
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 2; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check hatchling==1.33.0 editables==0.6

$(STAMPS)/serve: $(BIN)/python $(MANIFESTS)
	@$(AGAIN)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-e "core[text,uvloop]" $(addprefix -e ./,$(DISTRIBUTIONS))
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: $(BIN)/python $(MANIFESTS) requirements-dev.txt
	@$(AGAIN)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -r requirements-dev.txt
	@mkdir -p $(STAMPS) && touch $@ $(STAMPS)/serve

# Files are shared out among as many processes as there are cores; the tests of a file stay together.
PARALLEL ?= -n auto --dist loadfile

serve: $(STAMPS)/serve ## Set up, then serve (CONFIG=file, ARGS="--set a.b=c"; port: DYN_HTTP_PORT)
	@exec $(BIN)/dynamo serve $(CONFIG) $(ARGS)

test: $(STAMPS)/dev ## Set up, then run the tests
	@exec $(BIN)/python -m pytest $(PARALLEL) -m "not full" $(ARGS)

test-full: $(STAMPS)/dev ## The tests and the long lanes
	@exec $(BIN)/python -m pytest $(PARALLEL) -m "full or not full" $(ARGS)

check: $(STAMPS)/dev ## Lint, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/architecture

format: $(STAMPS)/dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMPS)/dev ## Measure this tree beside the bare probe (ARGS=--quick for a short one)
	@exec $(BIN)/python -m benchmarks suite $(ARGS)

clean: ## Remove what was set up
	rm -rf $(VENV) $(STAMPS)
