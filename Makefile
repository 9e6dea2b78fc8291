# make train    trains the example language model        ARGS="--steps 100 --experts loop"
# make test     runs the test suite, on all cores        PYTEST_ARGS="-k route -x", on one
# make fuzz     calls every function at random           MINUTES=5 ARGS="--device cuda --jobs 12"
# make sanitize runs the CPU kernels, and the suite with them, under sanitizers
# make build    builds the package in place             DEBUG=1, FUSED_MOE_ARCHS=sm_90a
# make docs     builds the documentation's site in build/docs; needs Python 3.11
# make format   formats the code; make lint checks that, and .github
# make types    checks the package's types with mypy
# make wheel    builds dist/*.tar.gz, and dist/*.whl from it; ARCH=aarch64, also on x86-64
# make clean    removes build outputs; remove .venv, too, to start from scratch
#
# Each target does its set-up on a fresh machine, once: tools/setup.sh checks for the system's packages and
# makes the environment; then ninja compiles what is out of date, against the PyTorch of that environment.

# The environment: an activated one, into which fused_moe and what it needs is then installed, else .venv.
# `make VENV=FOLDER` takes another, and makes it with $(PYTHON) if it is not there.
VENV   = $(or $(VIRTUAL_ENV),.venv)
PYTHON = python3

# What an environment without PyTorch gets: the newest PyTorch of benchmarks/results/matrix.md that there is for its
# Python; without an NVIDIA driver from CPU_INDEX, or with `make CPU_INDEX=` from pip's own index in any case.
TORCH     ?= torch<=2.15.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# The wheel's machine, and the tool that compiles for it if it is another one.
MACHINE := $(shell uname -m)
ARCH     = $(MACHINE)
cross    = $(patsubst %,tools/%.py,$(filter-out $(MACHINE),$(ARCH)))

MINUTES = 5

bin     = $(subst $() ,\ ,$(VENV))/bin
python  = $(bin)/python
# Without make's flags: ninja would ask the jobserver of `make -j`, which is not for it.
compile = MAKEFLAGS= $(python) setup.py --quiet build_ext --inplace
# Against the schemas that the package brings: nothing is fetched.
schema  = $(bin)/check-jsonschema --quiet --builtin-schema vendor
C_CODE  = $(shell find csrc tests/sanitize -name "*.[ch]*") tests/schedule_model.cpp $(wildcard tests/trust/*.cu)

export PYTHON TORCH CPU_INDEX
# Also build fused_moe._host, which tests need and a wheel must not contain.
build setup dev: export FUSED_MOE_HOST = 1
# `make build DEBUG=1`, but not a DEBUG of the environment: kernels' waits have a bound, past which they trap.
ifeq ($(origin DEBUG),command line)
export FUSED_MOE_DEBUG = $(DEBUG)
endif

build: setup
	$(compile)

train: build
	$(python) examples/train_lm.py $(ARGS)

test: build
	$(python) -m pytest $(or $(PYTEST_ARGS),-n auto --maxprocesses 8 --dist worksteal)

fuzz: build
	$(python) tests/trust/fuzz.py --minutes $(MINUTES) $(ARGS)

sanitize: build
	PYTHON=$(python) tests/sanitize/run.sh $(PYTEST_ARGS)

# -E: no page is taken from an earlier build, since Sphinx does not see that a docstring changed.
docs: build
	@sh tools/setup.sh "$(VENV)" docs
	$(python) -m sphinx -E -W --keep-going --quiet docs build/docs
	@echo "the site: build/docs/index.html"

format: dev
	$(bin)/clang-format -i $(C_CODE)
	$(bin)/ruff format
	$(bin)/ruff check --fix

lint: dev
	$(bin)/clang-format --dry-run --Werror $(C_CODE)
	@! grep -nE '.{111}' $(C_CODE) || { echo "expected at most 110 columns, comments included, found more"; false; }
	$(bin)/ruff format --check
	$(bin)/ruff check
	$(schema).github-workflows .github/workflows/*.yml
	$(schema).github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(schema).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(schema).dependabot .github/dependabot.yml
	$(schema).citation-file-format CITATION.cff
	$(bin)/zizmor --offline --quiet .github

# mypy reads PyTorch's types. CI runs `lint` where there is no PyTorch, so this is a target of its own.
types: dev
	$(python) -m mypy

# The sdist keeps its files' times, so that the wheel is linked from the objects of `make build`. auditwheel checks
# that it runs on glibc 2.28, PyTorch's oldest, and names it so; PyTorch's libraries are found by name and stay outside.
wheel: dev
	rm -rf dist
	FUSED_MOE_OBJECTS=$(CURDIR)/build/objects$(cross:%=-$(ARCH)) FUSED_MOE_MANYLINUX=1 \
		$(cross:%=$(python) %) $(python) -m build --no-isolation
	PATH=$(abspath $(VENV))/bin:$$PATH auditwheel repair --plat $(if $(cross),auto,manylinux_2_28_$(ARCH)) --only-plat \
		--exclude 'libtorch*.so' --wheel-dir dist dist/*.whl
	rm dist/*-linux_*.whl

clean:
	rm -rf build dist *.egg-info fused_moe/*.so compile_commands.json

setup:
	@sh tools/setup.sh "$(VENV)" test,train,bench

# After `setup`, since two pips in one environment would disturb each other.
dev: setup
	@sh tools/setup.sh "$(VENV)" dev

.PHONY: build train test fuzz sanitize docs format lint types wheel clean setup dev
