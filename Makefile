# Every target sets itself up: a machine with Python 3.11+, pip and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TESTS ?=

.PHONY: demo test test-slow check bench paper clean
.DELETE_ON_ERROR:

demo: $(VENV)/.runtime  ## every route, certified and verified, on data that ships with a dependency
	@rm -rf runs/demo
	$(BIN)/expunge demo --out runs/demo

test: $(VENV)/.development  ## every core path and doctest, warnings as errors
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow" $(TESTS)

test-slow: $(VENV)/.development  ## real compilers, clusters, browsers, killed processes, real data
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m slow $(TESTS)

check: $(VENV)/.development  ## format, lint, types, layers, the site, and nothing heavy at import
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -q -n 0 tests/test_surface.py

bench: $(VENV)/.development  ## ratios measured in one run; writes benchmarks/results/latest.json
	$(BIN)/python -m benchmarks.run

paper: $(VENV)/.development  ## every table and figure; what is finished is not run again; SMOKE=1
	@for script in experiments/table_*.py experiments/figure_*.py experiments/search.py; do \
	  echo "== $$script"; $(BIN)/python "$$script" $(if $(SMOKE),--smoke) || exit 1; done
	$(BIN)/python experiments/results_page.py $(if $(SMOKE),--check)

clean:
	rm -rf $(VENV) runs

$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expunge needs Python 3.11 or newer; set PYTHON=…")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e '.[torch]'
	@touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(PIP) -e '.[dev]' -e ./ledger
	@touch $@
