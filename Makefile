# Everything a checkout can do. Each target sets up what it needs; `make` alone lists them.
SHELL := /bin/bash
BIN := .venv/bin

.PHONY: help demo test long simulate mutants fresh lint bench gpu horovod lock lowest clean drills soak golden notebooks unit coverage docs pictures share recipes smoke
help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16

demo: ## Train on two ranks of this machine and show the result; needs no root, Slurm or GPU
	@tools/venv demo
	@tools/demo

test: ## Lint, types and all tests; as root on Debian also those on a real Slurm; UNIT_PYTHON=3.12: unit tests with that one
	@tools/venv torch
	@containers/install_horovod.sh --optional --wheel & tools/venv dev; made=$$?; wait $$! && exit $$made
	@tools/system-packages
	@containers/install_horovod.sh --optional
	@containers/install_apptainer.sh --optional
	@test -z "$(UNIT_PYTHON)" || tools/unit_venv "$(UNIT_PYTHON)"
	@UNIT_PYTHON="$(UNIT_PYTHON)" tools/test

long: ## The tests that take many minutes: thousands of cells, hundreds of trainings (root, real Slurm)
	@tools/venv dev
	@tools/system-packages
	@tools/image
	@tools/code_server
	$(BIN)/pytest -m long

fresh: ## make demo and make test on an empty Debian 12 that is made for it, RELEASE=trixie: 13 (root; 20 minutes)
	@RELEASE=$(RELEASE) tools/fresh

lint: ## ruff, mypy --strict, shellcheck
	@tools/venv dev
	@tools/lint

unit: ## The unit tests without what trains; needs no root and no Slurm
	@tools/venv dev
	$(BIN)/pytest tests/unit --ignore tests/unit/trainers --ignore tests/unit/horovod

simulate: ## A simulated cluster with faults, SEEDS=0-9999 LIVES=jobs (or cases, sweeps, queue, federation)
	@tools/venv dev
	nice -n 15 $(BIN)/python -W ignore tests/simulation/simulate.py --lives "$(or $(LIVES),jobs)" --seeds "$(or $(SEEDS),0-9999)"

mutants: ## Defects of the past, put back one by one: which of them does the simulation find (tests/mutants)
	@tools/venv dev
	nice -n 15 $(BIN)/python tests/mutants/find.py

coverage: ## Lines that make unit runs, with a floor; build/coverage/worst_modules.md names the worst modules
	@tools/venv dev
	@tools/coverage

drills: ## Every drill (hpcjobs drill) on the sandbox; root, about 15 minutes
	@tools/venv dev
	@tools/drills

soak: ## A training run killed a hundred times (KILLS=100); about 10 minutes
	@tools/venv dev
	$(BIN)/pytest -m long tests/unit/trainers/checkpoint/test_soak.py

docs: ## Build the documentation site, strictly, into build/site
	@tools/venv dev
	DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

golden: ## Write recorded scripts, help, outputs and generated pages anew (FILES=...: by these tests alone); read the difference
	@tools/venv dev
	GOLDEN=write $(BIN)/pytest $(or $(FILES),$$(grep -rlE 'GOLDEN|as_recorded' tests --include='test_*.py'))

pictures: ## Make the pictures of docs/images anew; needs Chromium
	@tools/venv dev
	$(BIN)/python tools/pictures

share: ## Write share/ anew: the manual page and the completions of shells
	@tools/venv demo
	$(BIN)/python tools/share

recipes: ## Recipes of conda-forge, Spack and EasyBuild in build/recipes; URL=where the sdist is published
	@tools/venv dev
	$(BIN)/python -m build --no-isolation --sdist
	$(BIN)/python tools/recipes dist/hpcjobs-*.tar.gz "$(URL)" build/recipes

smoke: ## Install the wheel by uv and pipx on Python 3.10 to 3.13 and run a job by each, without the checkout
	@tools/venv dev
	@tools/smoke

notebooks: ## Run the notebooks anew on this machine and keep what they show
	@tools/venv dev
	@tools/notebooks

bench: ## Run every file of benchmarks/
	@tools/venv dev
	@tools/bench

gpu: ## Prove the GPU path on this machine's GPUs, into gpu-report/; ARGS=--help, ARGS=--rehearse: on the CPU
	@tools/venv dev
	@tools/gpu $(ARGS)

horovod: ## Build Horovod for PyTorch, with MPI and Gloo, into .venv (once, minutes; the wheel is kept)
	@tools/venv dev
	@containers/install_horovod.sh

lowest: ## Unit tests with the lowest versions that pyproject.toml accepts, in .venv-lowest (TORCH=2.13.0: another torch)
	@tools/venv demo
	@tools/lowest

lock: ## Write constraints.txt and constraints-lowest.txt anew from pyproject.toml
	@tools/venv demo
	@tools/lock

clean: ## Take the sandbox down, remove .venv, caches and built files; run folders stay
	@tools/clean
