# Every target brings what it needs: a virtual environment in .venv, filled layer by layer by tools/install. What does not
# fit beside the rest has an environment of its own: DeepSpeed has .venv-deepspeed, for example.
#
#   PYTHON=/path/to/python     the interpreter to build .venv with (default: python3.11, else python3)
#   TORCH_INDEX=<index URL>    another index to take the CPU build of torch from
#
# pip reads this machine's own configuration.

VENV := .venv
#: The layers that have environments of their own.
APART := deepspeed executors megatron planes ray stores titan vllm
export PYTHON TORCH_INDEX
# Jobs, ranks and keepers start by the hundred: they load bytecode that the first of them wrote, as from a package of pip.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-nodes test test-slow test-frameworks test-matrix $(APART:%=test-%) test-gpu lint bench tables docs clean
.NOTPARALLEL: # one pip at a time in one .venv

demo: $(VENV)/peers.stamp
	$(VENV)/bin/python -m demo

# Needs root: it emulates nodes by namespaces.
demo-nodes: $(VENV)/dev.stamp
	$(VENV)/bin/python -m demo.nodes

# Three on two cores, for tests of processes mostly wait (four take as long, and miss limits of time); each file in one of them, whose warm ranks its tests share.
test: $(VENV)/dev.stamp
	$(VENV)/bin/pytest -q -n 3 --dist loadfile

# No stacks in mid-run: faulthandler reads the frames of threads that go on running, and that crashed a long test.
test-slow: $(VENV)/dev.stamp
	$(VENV)/bin/pytest -q -m slow -o faulthandler_timeout=0

test-frameworks: $(VENV)/dev.stamp
	$(VENV)/bin/pytest -q -m frameworks -o faulthandler_timeout=800

test-deepspeed: .venv-deepspeed/layer.stamp
	.venv-deepspeed/bin/pytest -q -m deepspeed -o faulthandler_timeout=280 \
		tests/interop/test_deepspeed_package.py tests/interop/test_deepspeed_engines.py \
		tests/interop/test_deepspeed_experts.py tests/interop/test_deepspeed_universal.py \
		tests/interop/test_deepspeed_kills.py tests/trainers/test_accelerate_deepspeed.py

test-executors: .venv-executors/layer.stamp
	.venv-executors/bin/pytest -q -m executors -o faulthandler_timeout=280 tests/importing/test_dask_and_mpi.py

test-megatron: .venv-megatron/layer.stamp
	.venv-megatron/bin/pytest -q -m megatron -o faulthandler_timeout=280 \
		tests/trainers/test_megatron_jobs.py tests/trainers/test_megatron_checkpoints.py \
		tests/trainers/test_megatron_fsdp.py

# Each half of a pair runs in the environment of its framework.
test-matrix: $(VENV)/dev.stamp .venv-deepspeed/layer.stamp .venv-megatron/layer.stamp
	DEEPSPEED_PYTHON=$(CURDIR)/.venv-deepspeed/bin/python MEGATRON_PYTHON=$(CURDIR)/.venv-megatron/bin/python \
		$(VENV)/bin/pytest -q -m matrix -o faulthandler_timeout=580 tests/jobs/test_matrix.py

test-planes: .venv-planes/layer.stamp
	.venv-planes/bin/pytest -q -m planes -o faulthandler_timeout=280 tests/frameworks/test_quantised.py

test-ray: .venv-ray/layer.stamp
	.venv-ray/bin/pytest -q -m ray -o faulthandler_timeout=380 \
		tests/trainers/test_ray_train.py tests/importing/test_ray_executor.py

# Only the servers are apart: the tests run in .venv.
test-stores: $(VENV)/dev.stamp .venv-stores/layer.stamp
	STORES_LAYER=$(CURDIR)/.venv-stores $(VENV)/bin/pytest -q -m stores -o faulthandler_timeout=280 tests/store

test-titan: .venv-titan/layer.stamp
	.venv-titan/bin/pytest -q -m titan -o faulthandler_timeout=380 \
		tests/trainers/test_torchtitan_jobs.py tests/trainers/test_torchft.py

test-vllm: .venv-vllm/layer.stamp
	.venv-vllm/bin/pytest -q -m vllm -o faulthandler_timeout=280 tests/inference/test_vllm.py

# Not in .venv, whose torch knows no GPU: in the environment at hand, which has pytest too.
test-gpu:
	PYTHONPATH=src python -m pytest -q -m gpu tests/snapshot/test_gpu.py

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

bench: $(VENV)/peers.stamp
	$(VENV)/bin/python -m bench

# The tables of docs/benchmarks.md and the figures of the README again, from the results in bench/results.
tables: $(VENV)/dev.stamp
	$(VENV)/bin/python -m bench table

# The guides and an API reference as a site, in site/index.html. What leads nowhere fails the build.
docs: $(VENV)/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(APART:%=.venv-%)

$(VENV)/torch.stamp: constraints/core.txt
$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml constraints/dev.txt constraints/docs.txt constraints/frameworks.txt
$(VENV)/peers.stamp: $(VENV)/torch.stamp pyproject.toml constraints/frameworks.txt constraints/peers.txt

.venv-stores/layer.stamp: tools/install constraints/stores.txt
	@VENV=.venv-stores tools/install stores
	@touch $@

.venv-%/layer.stamp: tools/install pyproject.toml constraints/core.txt constraints/dev.txt constraints/%.txt
	@VENV=.venv-$* tools/install torch
	@VENV=.venv-$* tools/install $*
	@touch $@

$(VENV)/%.stamp: tools/install
	@tools/install $*
	@touch $@
