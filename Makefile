# make help lists the targets. Everything lives in .venv; constraints.txt holds the tested versions.
PYTHON ?= python3
BIN := .venv/bin
export PROMPT ?= In the beginning

.PHONY: help setup run smollm test test-slow lint native native-asan bench-kernels bench-decode bench-streaming bench-speculation bench-serving bench-peers soak clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 20

setup: .venv/ready  ## make .venv with the packages for running and testing

# The requirements are those of pyproject.toml; the project itself is run from the checkout.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print("\n".join(p["dependencies"] + p["optional-dependencies"]["test"]))' > .venv/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r .venv/requirements.txt
	@touch $@

run: setup  ## generate text with the embedded model; PROMPT="..." make run
	@$(BIN)/python colibri.py

smollm: models/smollm/config.json  ## a real instruct model, SmolLM2 135M, in models/smollm: 93 MB to download, 2 GB of disk

# The package gguf is installed here and not by setup: nothing else needs it.
models/smollm/config.json: | setup
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print("\n".join(p["optional-dependencies"]["smollm"]))' > .venv/smollm.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r .venv/smollm.txt
	$(BIN)/python scripts/get_smollm.py

test: setup  ## the tests: no network, no GPU, a few minutes
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --max-worker-restart 0

test-slow: setup  ## soaks and big files: some minutes, 1.5 GB of disk
	$(BIN)/python -m pytest -q -m slow

lint: setup  ## ruff: rules and format; mypy: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

native: setup  ## compile the C kernels for every instruction set of this machine
	$(BIN)/python scripts/native.py

native-asan: setup  ## the kernel tests with the address and undefined behavior sanitizers, some minutes
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	$(BIN)/python -m pytest -q --sanitize tests/kernels/test_kernels.py tests/kernels/test_small_kernels.py tests/kernels/test_family_kernels.py tests/forward/test_kv_dtype.py

bench-kernels: setup  ## matrix kernels: share of the memory bandwidth, GFLOP/s against torch; some minutes
	$(BIN)/python bench/kernels.py

bench-decode: setup  ## decode and prefill of a synthetic GLM-5.2, all experts cached: 5 GB of disk and of memory
	$(BIN)/python bench/decode.py

bench-streaming: setup  ## expert streaming of a synthetic GLM-5.2: 17 GB of disk, 6 GB of memory, 8 minutes
	$(BIN)/python bench/streaming.py

bench-speculation: setup  ## speculative decoding: DRAFT=auto against fixed draft lengths: 0.1 GB of disk, some minutes
	$(BIN)/python bench/speculation.py

bench-serving: setup  ## continuous batching: eight clients against one: 17 GB of disk, 9 GB of memory
	$(BIN)/python bench/serving.py

bench-peers: setup  ## beside llama.cpp: LLAMA_BENCH=/path/to/llama-bench; 9 GB of disk, 8 GB of memory, an hour or more
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print("\n".join(p["optional-dependencies"]["peers"]))' > .venv/peers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r .venv/peers.txt
	$(BIN)/python bench/peers.py $(if $(LLAMA_BENCH),--llama-bench "$(LLAMA_BENCH)") \
	$(if $(C_ENGINE),--c-engine "$(C_ENGINE)") $(PEERS_OPTIONS)

soak: setup  ## mixed prompts for half an hour: checks the memory budget, leaks, and equal answers
	$(BIN)/python dev/soak.py

clean:  ## remove .venv and caches
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
