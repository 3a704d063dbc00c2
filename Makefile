# make run    set everything up and run the main job        make test      set up and pass the tests of the day
# make check  everything a change must pass                 make test-all  all of them
# make docs   rewrite the generated parts of the documents  make format    repair what ruff and clang-format can
# make site   build the documents as a site: build/site     make figures   draw every figure of the committed rows: build/figures
# Python 3.11 or newer is needed, and a C++ compiler where there is no GPU. PYTHON=python3.12 chooses another one.

PYTHON ?= python3
BIN := .venv/bin
SIZE := --batch 2 --heads 8 --seq 512 --dim 64

# With an NVIDIA GPU the cuda12 extra (a driver of CUDA 13 runs it too, and its NVRTC still knows sm_70). Without one nothing of
# CUDA is downloaded.
EXTRA := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda12)
comma := ,
# Without compiling: most modules of the packages are never imported, and Python compiles the others when they are.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
BASE_STAMP := .venv/.installed-base$(addprefix -,$(EXTRA))
DEV_STAMP := .venv/.installed-dev$(addprefix -,$(EXTRA))
DOCS_STAMP := .venv/.installed-docs

.PHONY: run test test-all check docs site figures format clean

run: $(BASE_STAMP)
	$(BIN)/fa-cli gen-data $(SIZE)
	$(BIN)/fa-cli run --compute fa2 --mode both --data data/B2_H8_S512_D64

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(DEV_STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ''

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict cli.py harness
	find kernels_cu harness -name '*.cu' -o -name '*.cuh' -o -name '*.hpp' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/python tests/generate.py --check
	$(MAKE) site
	$(MAKE) test

docs: $(DEV_STAMP)
	$(BIN)/python tests/generate.py

site: $(DOCS_STAMP)
	$(BIN)/python tests/support/pages.py build/pages
	$(BIN)/zensical build --strict

figures: $(DEV_STAMP)
	$(BIN)/python experiments/figures.py build/figures

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find kernels_cu harness -name '*.cu' -o -name '*.cuh' -o -name '*.hpp' -o -name '*.cpp' | xargs $(BIN)/clang-format -i

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# -- setting up: a stamp a kind of installation, older than pyproject.toml means install again -------------------------------

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "error: $(PYTHON) is missing or older than Python 3.11"; echo "hint: apt install python3 python3-venv, or make PYTHON=python3.12"; exit 4; } >&2
	@$(PYTHON) -m venv .venv || { echo "hint: apt install python3-venv" >&2; exit 4; }
	@touch $@

$(BASE_STAMP): pyproject.toml | .venv/.made
	$(PIP) -e '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

$(DEV_STAMP): pyproject.toml | .venv/.made
	$(PIP) -e '.[dev$(if $(EXTRA),$(comma)$(EXTRA))]'
	@touch $@

$(DOCS_STAMP): pyproject.toml | .venv/.made
	$(PIP) -e '.[docs]'
	@touch $@
