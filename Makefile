# Every target sets up what it needs; a second run re-uses it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
# protoc finds its plugins on the path.
TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python

.PHONY: setup demo test test-compose check bench vectors exact gen lock clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@PYTHON="$(PYTHON)" sh scripts/setup.sh

demo: $(STAMP)
	@$(BIN)/python -m services.cli.demo

test: $(STAMP)
	@$(BIN)/pytest

test-compose: $(STAMP)
	@$(BIN)/pytest tests/compose -ra

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code
	@$(BIN)/buf breaking --against protos/api.binpb
	@$(TOOLS) protos/generate.py --check

bench: $(STAMP)
	@$(BIN)/python -m tests.benchmarks

FILE ?= tests/vectors/placement.json
CONFIGS ?= tests/vectors/architectures.json
vectors: $(STAMP)
	@$(BIN)/python -m tests.conformance.placement $(FILE)

exact: $(STAMP)
	@$(BIN)/python -m tests.conformance.exact $(CONFIGS)

gen: $(STAMP)
	@$(TOOLS) protos/generate.py
	@$(BIN)/python scripts/errors-doc.py
	@$(BIN)/python scripts/api-doc.py

lock: $(STAMP)
	@$(BIN)/uv pip compile -q --universal --no-emit-index-url --no-header --python-version 3.11 \
		--extra runner --extra gateway --extra dev pyproject.toml -o requirements.lock

clean:
	rm -rf .venv
