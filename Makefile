# Two commands do everything: `make run` answers with the built-in model, `make test` runs the tests.
# Both make their own virtual environment first; a second call starts at once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: run test test-full lint format pictures clean

run: $(INSTALLED)
	@$(BIN)/python -m pipeline.run $(if $(findstring conf=,$(ARGS)),,conf=saguaro) $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

# The long comparisons on the demo model: an hour or more on two cores.
test-full: $(INSTALLED)
	$(BIN)/python -m pytest -m full $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "expected Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version); try: make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a minute or two, about 1.3 GB" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' >&2
	@touch $@

# The README's pictures of rounds, made anew on this machine. A planner would try other ways in some of them.
pictures: $(INSTALLED)
	@for run in speculative saguaro saguaro_tree; do \
		$(BIN)/python -m tools.profile conf=$$run out=build/profile/$$run picture=docs/rounds-$$run.png \
			prompt="Write a Python function that returns the n-th Fibonacci number." max_tokens=96 seed=1 \
			speculation.plan=fixed $(ARGS) || exit 1; \
	done

clean:
	rm -rf $(VENV) .ci/venv build ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
