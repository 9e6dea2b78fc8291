# make train    trains the example language model        ARGS="--steps 100 --experts loop"
# make test     runs the test suite                      PYTEST_ARGS="-k route -x"
# make fuzz     calls every function at random           MINUTES=5 ARGS="--device cuda --jobs 12"
# make sanitize runs the CPU kernels, and the suite with them, under sanitizers
# make build    builds the package in place
# make format   formats the code; make lint only checks it
# make wheel    builds dist/*.tar.gz, and dist/*.whl from it
# make clean    removes build outputs; remove $(VENV), too, to start from scratch
#
# Each target does its set-up on a fresh machine, once: tools/setup.sh checks for the system's packages and
# makes $(VENV); then ninja compiles what is out of date, against the PyTorch of $(VENV).

PYTHON = python3
VENV   = .venv
TORCH  = torch==2.13.0

MINUTES = 5

python  = $(VENV)/bin/python
compile = $(python) setup.py --quiet build_ext --inplace
install = $(python) -m pip install --quiet --no-build-isolation --editable
C_CODE  = $(shell find csrc tests/sanitize -name "*.[ch]*") tests/schedule_model.cpp tests/trust/hold_sms.cu

# Also build fused_moe._host, which tests need and a wheel must not contain.
build $(VENV)/built $(VENV)/dev: export FUSED_MOE_HOST = 1

build: $(VENV)/built
	$(compile)

train: build
	$(python) examples/train_lm.py $(ARGS)

test: build
	$(python) -m pytest $(PYTEST_ARGS)

fuzz: build
	$(python) tests/trust/fuzz.py --minutes $(MINUTES) $(ARGS)

sanitize: build
	PYTHON=$(python) tests/sanitize/run.sh $(PYTEST_ARGS)

format: $(VENV)/dev
	$(VENV)/bin/clang-format -i $(C_CODE)
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

lint: $(VENV)/dev
	$(VENV)/bin/clang-format --dry-run --Werror $(C_CODE)
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check

# The sdist keeps its files' times, so that the wheel is linked from the objects of `make build`. auditwheel gives it
# the tag of the oldest glibc that it runs on; PyTorch's libraries are found by name and stay outside.
wheel: $(VENV)/dev
	rm -rf dist
	FUSED_MOE_OBJECTS=$(CURDIR)/build/objects $(python) -m build --no-isolation
	PATH=$(abspath $(VENV))/bin:$$PATH auditwheel repair --only-plat --exclude 'libtorch*.so' --wheel-dir dist dist/*.whl
	rm dist/*-linux_*.whl

clean:
	rm -rf build dist *.egg-info fused_moe/*.so compile_commands.json $(VENV)/built

$(VENV)/ready: tools/setup.sh
	PYTHON=$(PYTHON) sh tools/setup.sh $(VENV) $(TORCH)
	touch $@

# pip would compile, too, but without showing progress.
$(VENV)/built: $(VENV)/ready pyproject.toml
	$(compile)
	$(install) '.[test,train,bench]'
	touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/built
	$(install) '.[dev]'
	touch $@

.PHONY: build train test fuzz sanitize format lint wheel clean
