# Every target makes what it needs: Python 3.11 or newer and make are enough to start.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip install --quiet --disable-pip-version-check --constraint constraints.txt
READY := $(VENV)/.ready

TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
# make test WHEEL=dist/adaattn-....whl tests a wheel that is already built; src/ may be gone then.
WHEEL ?=
SOURCES := $(if $(WHEEL),,$(shell find src -type f -not -name '*.pyc'))
DEMO_HTML := build/evaluate.html

.PHONY: demo says-how-long test lint workflows type test-gpu bench docs tables picture dist install clean
.DELETE_ON_ERROR:

demo: says-how-long $(READY)/package
	mkdir -p $(dir $(DEMO_HTML))
	$(VENV)/bin/adaattn evaluate --model demo --text opticks --tokens 5120 --cases --html $(DEMO_HTML)

says-how-long:
	@echo "make demo takes about 4 minutes on 2 CPU cores, 1 for the installation, and 2 GB of memory"

test: $(READY)/test $(READY)/package
	env -u PYTHONPATH OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RUN) pytest -n 2 --dist worksteal $(if $(ARGS),,--cov=adaattn) $(ARGS)

lint: workflows $(READY)/lint
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) codespell_lib
	PYTHONPATH=src $(VENV)/bin/lint-imports --no-logo --no-cache
	$(RUN) interrogate --quiet src
	$(RUN) bandit --quiet --recursive --configfile pyproject.toml src

workflows: $(READY)/lint
	$(VENV)/bin/zizmor --offline --no-progress --quiet --persona auditor .github

type: $(READY)/type
	$(RUN) mypy

test-gpu: $(READY)/test $(READY)/package
	env -u PYTHONPATH $(RUN) pytest -m gpu $(ARGS)

bench: $(READY)/package
	$(RUN) benchmarks.ops.run $(ARGS)

docs: $(READY)/docs $(READY)/package
	$(RUN) sphinx --fail-on-warning --quiet docs build/docs

# The tables in README.md and docs/ that say what the code declares, and BENCHMARKS.md.
tables: $(READY)/package
	$(VENV)/bin/python scripts/support_table.py --write
	$(VENV)/bin/python scripts/benchmarks_page.py --write

# The picture in README.md; needs Chromium.
picture: demo
	scripts/readme_picture.sh $(DEMO_HTML) docs/images/evaluate.png

dist: $(READY)/base
	$(PIP) --group build build
	rm -rf dist
	$(RUN) build --no-isolation --outdir dist .

install: $(READY)/package

clean:
	rm -rf build dist .coverage .mypy_cache .pytest_cache .ruff_cache

$(READY)/base: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	mkdir -p $(READY) && touch $@

# torch alone and first: asked for with packages that need it, it may come as the CUDA build.
$(READY)/torch: $(READY)/base
	$(PIP) --no-deps "$(TORCH)"
	$(PIP) "$(TORCH)"
	touch $@

$(READY)/lint $(READY)/docs: $(READY)/%: pyproject.toml $(READY)/base
	$(PIP) --group $*
	touch $@

# The kernels are compiled with the oldest Triton that is supported too; it needs no GPU for that.
OLDEST_TRITON := $(if $(filter Linux,$(shell uname -s)),build/triton-3.6.0)
$(READY)/test: $(OLDEST_TRITON)
build/triton-%: | $(READY)/base
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$*

$(READY)/type $(READY)/test: $(READY)/%: pyproject.toml $(READY)/torch
	$(PIP) --group $*
	touch $@

# What runs is always the built wheel, never the source tree.
ifdef WHEEL
$(READY)/package: $(WHEEL) $(READY)/torch
	$(PIP) "$(WHEEL)[bench,cli,hf,viz]"
	touch $@
else
$(READY)/package: $(SOURCES) pyproject.toml README.md LICENSE $(READY)/torch
	$(PIP) --group build
	rm -rf build/wheel
	$(RUN) pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PIP) "$$(echo build/wheel/adaattn-*.whl)[bench,cli,hf,viz]"
	$(PIP) --no-deps --force-reinstall build/wheel/adaattn-*.whl
	touch $@
endif
