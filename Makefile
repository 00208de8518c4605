# Every target brings what it needs: a virtual environment in .venv, filled layer by layer by tools/install. DeepSpeed,
# Megatron-core, Ray and libraries of quantised tensors have one each of their own, in .venv-deepspeed, .venv-megatron,
# .venv-ray and .venv-planes.
#
#   PYTHON=/path/to/python     the interpreter to build .venv with (default: python3.11, else python3)
#   TORCH_INDEX=<index URL>    another index to take the CPU build of torch from
#
# pip reads this machine's own configuration.

VENV := .venv
DEEPSPEED := .venv-deepspeed
MEGATRON := .venv-megatron
RAY := .venv-ray
PLANES := .venv-planes
export PYTHON TORCH_INDEX

.PHONY: demo test test-slow test-frameworks test-deepspeed test-megatron test-matrix test-ray test-planes test-gpu lint bench tables docs clean
.NOTPARALLEL: # one pip at a time in one .venv

demo: $(VENV)/peers.stamp
	$(VENV)/bin/python -m demo

# Two at a time, for tests of processes mostly wait; each file in one of them, whose warm ranks its tests share.
test: $(VENV)/dev.stamp
	$(VENV)/bin/pytest -q -n 2 --dist loadfile

# No stacks in mid-run: faulthandler reads the frames of threads that go on running, and that crashed a long test.
test-slow: $(VENV)/dev.stamp
	$(VENV)/bin/pytest -q -m slow -o faulthandler_timeout=0

test-frameworks: $(VENV)/dev.stamp
	$(VENV)/bin/pytest -q -m frameworks -o faulthandler_timeout=800

test-deepspeed: $(DEEPSPEED)/deepspeed.stamp
	$(DEEPSPEED)/bin/pytest -q -m deepspeed -o faulthandler_timeout=280 \
		tests/interop/test_deepspeed_package.py tests/interop/test_deepspeed_engines.py \
		tests/interop/test_deepspeed_experts.py tests/interop/test_deepspeed_universal.py \
		tests/trainers/test_accelerate_deepspeed.py

test-megatron: $(MEGATRON)/megatron.stamp
	$(MEGATRON)/bin/pytest -q -m megatron -o faulthandler_timeout=280 tests/trainers/test_megatron_jobs.py tests/trainers/test_megatron_checkpoints.py

# Each half of a pair runs in the environment of its framework.
test-matrix: $(VENV)/dev.stamp $(DEEPSPEED)/deepspeed.stamp $(MEGATRON)/megatron.stamp
	DEEPSPEED_PYTHON=$(CURDIR)/$(DEEPSPEED)/bin/python MEGATRON_PYTHON=$(CURDIR)/$(MEGATRON)/bin/python \
		$(VENV)/bin/pytest -q -m matrix -o faulthandler_timeout=580 tests/jobs/test_matrix.py

test-ray: $(RAY)/ray.stamp
	$(RAY)/bin/pytest -q -m ray -o faulthandler_timeout=380 tests/trainers/test_ray_train.py

test-planes: $(PLANES)/planes.stamp
	$(PLANES)/bin/pytest -q -m planes -o faulthandler_timeout=280 tests/frameworks/test_quantised.py

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
	rm -rf $(VENV) $(DEEPSPEED) $(MEGATRON) $(RAY) $(PLANES)

$(VENV)/torch.stamp: constraints/core.txt
$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml constraints/dev.txt constraints/docs.txt constraints/frameworks.txt
$(VENV)/peers.stamp: $(VENV)/torch.stamp pyproject.toml constraints/frameworks.txt constraints/peers.txt

$(DEEPSPEED)/deepspeed.stamp: tools/install pyproject.toml constraints/core.txt constraints/deepspeed.txt
	@VENV=$(DEEPSPEED) tools/install torch
	@VENV=$(DEEPSPEED) tools/install deepspeed
	@touch $@

$(MEGATRON)/megatron.stamp: tools/install pyproject.toml constraints/core.txt constraints/megatron.txt
	@VENV=$(MEGATRON) tools/install torch
	@VENV=$(MEGATRON) tools/install megatron
	@touch $@

$(RAY)/ray.stamp: tools/install pyproject.toml constraints/core.txt constraints/ray.txt
	@VENV=$(RAY) tools/install torch
	@VENV=$(RAY) tools/install ray
	@touch $@

$(PLANES)/planes.stamp: tools/install pyproject.toml constraints/core.txt constraints/planes.txt
	@VENV=$(PLANES) tools/install torch
	@VENV=$(PLANES) tools/install planes
	@touch $@

$(VENV)/%.stamp: tools/install
	@tools/install $*
	@touch $@
