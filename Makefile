# The two commands: `make up` serves a model on this machine, `make test` proves that it does.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# setuptools warns of folders named like packages, which an editable install of this layout has to have.
PIP := PYTHONWARNINGS=ignore $(BIN)/pip --disable-pip-version-check --quiet
MODEL ?= smollm2-135m

.DEFAULT_GOAL := help
.PHONY: help up down test test-again compose-up compose-down compose-test engine lint types protos protos-check clean

help: ## Show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

up: $(VENV)/.installed ## Install, fetch the model, start the mesh, print what to try (Ctrl-C stops it)
	@$(BIN)/shoal up --model $(MODEL)

down: ## Stop a mesh that runs in the background
	@$(BIN)/shoal down

test: $(VENV)/.installed-dev ## Install what the tests need and run them all
	@$(BIN)/shoal pull $(MODEL)
	@$(BIN)/python -m gpu_worker.kernels || echo "The kernels' own tests will fail; the rest computes with torch."
	$(BIN)/pytest $(PYTEST_ARGS) || { [ $$? -eq 1 ] && $(MAKE) --no-print-directory test-again; }

# Some tests measure time, of which a shared machine can starve one. What fails twice has failed.
test-again:
	@echo "Once more, what failed:"
	$(BIN)/pytest --last-failed --last-failed-no-failures none $(PYTEST_ARGS)

compose-up: engine ## Build the images and start the mesh in containers (COMPOSE_ARGS="--scale gateway=2")
	@deploy/compose.sh up --build --detach $(COMPOSE_ARGS)
	@deploy/compose.sh ps

compose-down: engine ## Stop the containers (volumes stay)
	@deploy/compose.sh down

# Minutes of building and running, so `make test` leaves it out. COMPOSE_BUILD_ARGS=--no-cache builds from nothing.
compose-test: engine $(VENV)/.installed-dev ## Build the images, start a mesh of containers, hurt it, stop it
	COMPOSE_TEST=1 $(BIN)/pytest -v --durations=0 tests/deploy/compose

engine:
	@deploy/compose.sh

lint: $(VENV)/.installed-dev ## Format check and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev ## mypy --strict
	$(BIN)/mypy

protos: $(VENV)/.installed-dev ## Make the stubs again from protos/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/protos.py

protos-check: protos ## Fail if the checked-in stubs are not what the protos give
	git diff --exit-code -- protos

clean: ## Remove the virtual environment and caches (pulled models stay)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

$(VENV)/bin/python:
	@echo "Making $(VENV) …"
	@$(PYTHON) -m venv $(VENV) || { echo "Python 3.11 with venv is needed (Debian: apt-get install python3-venv)"; exit 1; }

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing Shoal and what it needs (once; torch is the large part) …"
	@$(PIP) install --progress-bar on --no-compile -c constraints.txt -e '.[all]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need (once) …"
	@$(PIP) install --no-compile -c constraints.txt -e '.[dev]'
	@touch $@
