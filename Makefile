# make train                            train a small GPT with Muon under ZeRO: two ranks on CPU, or one on each GPU
# make train DATA=path                  the same on a text file or a folder of text files of your own
# make train again                      goes on from the last checkpoint in runs/ (a finished run needs more --steps)
# make test                             the default tests, about 8 minutes on two cores
# make test-full                        all tests but whole products; once all pass it notes the commit in .ci/full
# make mutate                           breaks a copy of the code in 80 ways, and says which default test notices each
# make lint | bench | docs | clean
# make rehearse                         the CUDA path without a GPU: torch's CUDA build (6 GB) on a device that computes nothing
# make gpu                              all that only a GPU can tell, into runs/gpu/; installs nothing, needs no network
# make gpu PART=lease                   one of four parts, each under ten minutes: lease, lease-2, more, tune
#
# PYTHON=python3.12                     the interpreter that .venv is created from; for `make gpu`, the one to run with
# RANKS=4                               how many processes `make train` starts
# LINK=1600mbit                         rates that `make bench` limits the link between ranks to (root, Linux)
# TEST_JOBS=1                           how many test files `make test` runs side by side (2)
# MUTATE_ARGS="--only momenta"          which faults `make mutate` tries; --help lists what else there is
# DOCS_EDIT=https://host/edit/main      where the pages of `make docs` link to be edited; else to their files beside it
# REHEARSE_VENV=/path/to/env            where `make rehearse` installs torch's CUDA build (.venv-rehearse)
# VENV=/path/to/env TORCH=system        install into an environment you have and keep its torch (a CUDA build, say)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
DATA ?=
TRAIN_ARGS ?=
TEST_JOBS ?= 2
PYTEST_ARGS ?=
MUTATE_ARGS ?=
BENCH_ARGS ?=
LINK ?=
GPU_ARGS ?=
PART ?=
REHEARSE_VENV ?= .venv-rehearse
REHEARSE_ARGS ?=

BIN := $(VENV)/bin
# One rank per visible GPU, else two on CPU, which share its cores.
COUNT_RANKS := import torch; print(torch.cuda.device_count() or 2)

INSTALLED := from importlib.metadata import distributions; \
	found = {d.name: d.version for d in distributions()}; \
	print(*(f'{name}=={found[name]}' for name in ('torch', 'triton') if name in found), sep='\n')

.DEFAULT_GOAL := help
.PHONY: help train test test-full mutate lint types bench rehearse gpu docs clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# torch comes first and by exact version: a range would let the resolver fetch several builds of it, gigabytes each.
# TORCH=system keeps the torch and Triton that are there: they are pinned to what they are, and setuptools, which torch
# bounds, is not pinned at all; else the resolver would take a newer torch to satisfy our pins.
$(VENV)/.train: pyproject.toml constraints.txt
	$(BIN)/python -m pip --version || $(PYTHON) -m venv $(if $(filter system,$(TORCH)),--system-site-packages) $(VENV)
ifeq ($(TORCH),system)
	$(BIN)/python -c "import torch"
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -c "$(INSTALLED)" >> $(VENV)/constraints.txt
else
	cp constraints.txt $(VENV)/constraints.txt
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt "$(TORCH)" setuptools
endif
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt -e ".[examples]"
	touch $@

# Linters, pytest, and the libraries that there are integrations for.
$(VENV)/.test: $(VENV)/.train
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt -e ".[dev]"
	touch $@

train: $(VENV)/.train
	ranks=$${RANKS:-$$($(BIN)/python -c "$(COUNT_RANKS)")}; \
	cores=$$(getconf _NPROCESSORS_ONLN); \
	export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$((cores > ranks ? cores / ranks : 1))}; \
	$(BIN)/python -m torch.distributed.run --standalone --nproc_per_node=$$ranks \
	    examples/train_gpt.py --config examples/config.json $(if $(DATA),--data "$(DATA)") $(TRAIN_ARGS)

# A file stays with one process, which starts its ranks once. Half of the time ranks wait for each other. Byte code is
# written, whatever the environment says: each of some hundred processes would compile the sources anew.
test: $(VENV)/.test
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# The default tier and the rest in one session. What `.ci/run` then leaves out of the full tier, it leaves out for what
# has not changed since the commit that is noted here.
test-full: $(VENV)/.test
	commit=$$(git rev-parse HEAD); \
	$(MAKE) --no-print-directory test PYTEST_ARGS="-m 'not campaign' $(PYTEST_ARGS)" && \
	$(BIN)/python tests/affected.py --passed "$$commit" $(if $(PYTEST_ARGS),--in-part)

mutate: $(VENV)/.test
	$(BIN)/python -u tests/mutate.py $(MUTATE_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/python docs/words.py
	$(MAKE) --no-print-directory types

# mypy sees the package as it is installed, through links: compile_muon/ with passes/ and kernels/ inside it.
types: $(VENV)/.test
	rm -rf .mypy_view && mkdir -p .mypy_view/compile_muon
	ln -s $(addprefix ../../,$(filter-out %__pycache__,$(wildcard compile_muon/*)) passes kernels) .mypy_view/compile_muon/
	cd .mypy_view && $(abspath $(BIN))/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p compile_muon

bench: $(VENV)/.test
	$(BIN)/python benchmarks/train_step.py \
	    $(if $(LINK),--preset small --stages 1 3 --links unlimited $(LINK)) $(BENCH_ARGS)

# Nothing is installed: a bare machine with torch and Triton will do. PYTHON given by name comes before .venv.
gpu:
	$(if $(filter command,$(origin PYTHON)),$(PYTHON),$(firstword $(wildcard $(BIN)/python) $(PYTHON))) benchmarks/gpu.py $(if $(PART),--part $(PART)) $(GPU_ARGS)

# Three equals signs ask for torch's build with CUDA. It runs without a driver; see rehearse/README.md.
$(REHEARSE_VENV)/.rehearse: pyproject.toml
	$(PYTHON) -m venv $(REHEARSE_VENV)
	$(REHEARSE_VENV)/bin/python -m pip install torch===$(patsubst torch==%,%,$(filter torch==%,$(TORCH))) numpy safetensors rich nvtx matplotlib
	$(REHEARSE_VENV)/bin/python -m pip install --no-deps -e .
	touch $@

rehearse: $(REHEARSE_VENV)/.rehearse
	$(REHEARSE_VENV)/bin/python rehearse/run.py $(REHEARSE_ARGS)

# A site from the pages, into build/site. A broken link or a missing reference fails.
$(VENV)/.docs: $(VENV)/.train
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt -e ".[docs]"
	touch $@

docs: $(VENV)/.docs
	$(BIN)/python docs/build_site.py

clean:
	rm -rf .venv .venv-rehearse .cache .mypy_view .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist runs *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
