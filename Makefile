# What can be made here. Everything lives in .venv and build/; `make clean` removes both.
# Needs python3 (3.10 or newer, with venv), a C compiler and make. Stamps in .venv say what is
# installed, so a second run only does what changed.

PYTHON ?= python3
DEVICE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
CC ?= cc

SOURCES := $(shell find csrc -name '*.[ch]')
CORE := $(wildcard csrc/core/*.c csrc/backend/*.c csrc/backend/cpu/*.c)
C_TESTS := $(patsubst tests/c/%.c,%,$(wildcard tests/c/test_*.c))

help:
	@echo "make demo      answer the shipped questions with and without kvcomm; table, HTML report"
	@echo "make test      run the tests (DEVICE=cpu, or guard)"
	@echo "make parity    compare with every recording in ../shared, both models"
	@echo "make peers     environments of the programs that benchmarks compare with"
	@echo "make bench     every benchmark, both models, with plots (hours)"
	@echo "make notebooks run the notebooks and store their outputs"
	@echo "make build     install the package, editable, into $(VENV)"
	@echo "make c-tests   the C unit tests, without Python"
	@echo "make sanitize  the C unit tests under address, undefined-behaviour and thread sanitizers"
	@echo "make lint      ruff, clang-format, the include check, the README's tables"
	@echo "make abi-check csrc/py/abi.h against CPython's headers, where they are"
	@echo "make package   sdist and wheel, tried in an environment of their own"
	@echo "make clean     remove $(VENV), build/ and compiled files"

# ---- the package ----

$(VENV)/made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Editable: Python changes need no step; a change of C or of the metadata does.
$(VENV)/built: $(VENV)/made pyproject.toml setup.py $(SOURCES)
	$(BIN)/python -m pip install --quiet --use-pep517 --editable '.[test]'
	@touch $@

$(VENV)/linters: $(VENV)/made Makefile
	$(BIN)/python -m pip install --quiet 'ruff>=0.6' 'clang-format>=18'
	@touch $@

build: $(VENV)/built

demo: build
	$(BIN)/kvcomm demo

test: build
	KVCOMM_TEST_DEVICE=$(DEVICE) $(BIN)/python -m pytest -q tests

# Every recording of ../shared/reference, both models: about eight minutes.
parity: build
	KVCOMM_TEST_FULL=1 $(BIN)/python -m pytest -q tests/test_parity.py

peers:
	$(PYTHON) benchmarks/peers/make.py

# Every benchmark on both models, f32 and bf16: hours. BENCH='--quick -- --peers none' is short.
bench: build
	$(BIN)/python benchmarks/bench.py $(BENCH)

notebooks: build
	$(BIN)/python notebooks/run.py

lint: $(VENV)/linters
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(SOURCES) $(wildcard tests/c/*.[ch])
	$(PYTHON) tests/check_includes.py
	$(PYTHON) benchmarks/readme.py --check

# ---- C unit tests: one program per flavour, of the core, the CPU backend and tests/c ----

C_FLAGS := -std=c11 -g -ffp-contract=fast -Wall -Wextra -Werror -Icsrc/include -pthread
WRAP := -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=aligned_alloc,--wrap=posix_memalign

FLAGS_plain := -O2
FLAGS_address := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
FLAGS_thread := -O1 -fsanitize=thread

build/c/%: $(SOURCES) $(wildcard tests/c/*.[ch]) Makefile
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $(FLAGS_$*) -o $@ $(wildcard tests/c/test_*.c) tests/c/main.c tests/c/tiny.c \
	    tests/c/failing_malloc.c $(CORE) $(WRAP) -lm

c-tests: build/c/plain
	build/c/plain

sanitize: build/c/address build/c/thread
	ASAN_OPTIONS=detect_leaks=1 build/c/address
	build/c/address --device guard
	TSAN_OPTIONS=halt_on_error=1 build/c/thread threads

# CPython's headers are not needed to build; where they are, abi.h is held against them.
abi-check:
	$(CC) -std=c11 -Wall -Wextra -Werror -fsyntax-only tests/c/abi_check.c
	@headers=$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_paths()["include"])'); \
	if test -f "$$headers/Python.h"; then \
	    $(CC) -std=c11 -Wall -Werror -fsyntax-only -DWITH_PYTHON_H -I"$$headers" \
	        tests/c/abi_check.c && echo "abi.h agrees with $$headers"; \
	else echo "abi.h: no Python.h here to hold it against"; fi

# ---- what a user installs: sdist, wheel from it, and the wheel in an environment of its own ----

package: $(VENV)/made
	rm -rf build/package && mkdir -p build/package
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --quiet --outdir build/package .
	$(PYTHON) -m venv build/package/venv
	build/package/venv/bin/python -m pip install --quiet build/package/kvcomm-*.whl
	cd build/package && venv/bin/python -c 'import kvcomm, kvcomm._core; \
	    print("kvcomm", kvcomm.__version__, kvcomm.devices()[0]["description"])'
	build/package/venv/bin/kvcomm --help > build/package/help.txt

clean:
	rm -rf $(VENV) build dist *.egg-info kvcomm/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help build demo test parity peers bench notebooks lint c-tests sanitize abi-check package clean
.DEFAULT_GOAL := help
