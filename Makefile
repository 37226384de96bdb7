# People and CI use the same targets; each installs what it needs, once.
#   make serve | test | check | bench | accept-engine | accept-gang | accept-proposers | accept-serving |
#        accept-exactness | clean
# VENV and PYTHON may be given: `make test VENV=/path/to/venv PYTHON=python3.12`.

PYTHON ?= python3
VENV ?= .venv
OLDEST_VENV ?= .venv-oldest
OLDEST_TRANSFORMERS := 5.17.0
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.slipstream-installed
OLDEST_READY := $(OLDEST_VENV)/.slipstream-installed
TORCH := $(shell grep '^torch==' constraints.txt)
RESULTS := benchmarks/results

TWO_THREADS := OMP_NUM_THREADS=2

# What the gang's acceptance runs, and the engine's does not.
GANG_TESTS := $(filter-out $(wildcard tests/test_ray_serve_*.py tests/test_ray_metrics.py), $(sort $(wildcard tests/test_gang_*.py \
	tests/test_process_gang.py tests/test_ray_*.py tests/test_tensor_parallel*.py tests/test_doctor.py)))
# And what the proposers' acceptance runs.
PROPOSER_TESTS := $(addprefix tests/test_,$(addsuffix .py,attention_drafters capture demo_heads detection \
	drafter_traps draft_runner every_proposer formats heads learned_worker lookahead malformed model_free \
	model_free_arguments model_free_engine mtp own_proposer parallel_drafters parts proposers rest seed_examples \
	seed_pairs static_tree translation trees tree_attention))
# And what the servers' acceptance runs.
SERVING_TESTS := $(sort $(wildcard tests/test_serving_*.py tests/test_grpc*.py tests/test_structured*.py \
	tests/test_openai*.py tests/test_deploy*.py tests/test_ray_serve*.py tests/test_playground*.py \
	tests/test_bench_serve*.py tests/test_bad_input*.py $(addprefix tests/test_,$(addsuffix .py,http logs \
	origins phases ray_metrics serve_http watching_files))))
# And what the acceptance of exactness runs.
EXACTNESS_TESTS := $(sort $(wildcard tests/test_exactness_*.py tests/test_check*.py tests/test_batch_invariant*.py \
	tests/test_rules*.py tests/test_every_proposer_by_laws.py))

.PHONY: install serve test protos check bench accept-engine accept-gang accept-proposers accept-serving accept-exactness \
	accept-oldest clean

serve: $(READY)
	$(BIN)/slipstream serve $(ARGS)

test: check
	$(TWO_THREADS) $(BIN)/python -m pytest $(ARGS)

# The floors of grpcio and protobuf in pyproject.toml follow the version of grpcio-tools.
protos: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/slipstream_v1.proto

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.engine --output $(RESULTS)/engine.json $(ARGS)
	$(BIN)/python -m benchmarks.off_is_free --output $(RESULTS)/off_is_free.json
	$(BIN)/python -m benchmarks.proposers --output $(RESULTS)/proposers.json

accept-engine: check accept-oldest
	$(TWO_THREADS) $(BIN)/python -m pytest -m full -s $(addprefix --ignore=,$(GANG_TESTS) $(PROPOSER_TESTS) $(SERVING_TESTS) \
		$(EXACTNESS_TESTS))
	$(MAKE) bench

# Several processes a test on as many processors as there are: one thread each.
accept-gang: check
	mkdir -p $(RESULTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m full -s $(GANG_TESTS)
	$(BIN)/python -m benchmarks.round_latency --output $(RESULTS)/round_latency.json
	$(BIN)/python -m benchmarks.late_draft --output $(RESULTS)/late_draft.json
	$(BIN)/python -m benchmarks.soak --output $(RESULTS)/soak.json

accept-proposers: check
	mkdir -p $(RESULTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "full or not full" -s $(PROPOSER_TESTS)
	$(BIN)/python -m benchmarks.model_free --output $(RESULTS)/model_free.json
	$(BIN)/python -m benchmarks.proposers --output $(RESULTS)/proposers.json

accept-serving: check
	mkdir -p $(RESULTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "full or not full" -s $(SERVING_TESTS)
	$(BIN)/python -m benchmarks.overload --threads 1 --output $(RESULTS)/overload.json
	$(BIN)/python -m benchmarks.http_overhead --output $(RESULTS)/http_overhead.json

accept-exactness: check
	mkdir -p $(RESULTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "full or not full" -s $(EXACTNESS_TESTS)
	$(BIN)/python -m benchmarks.acceptance --output $(RESULTS)/acceptance.json
	$(BIN)/python -m benchmarks.invariance --prompts 500 --tokens 256 --share 42 --plain-prompts 32 \
		--output $(RESULTS)/invariance.json

# The oldest transformers that is promised, in an environment of its own.
accept-oldest: $(OLDEST_READY)
	$(TWO_THREADS) $(OLDEST_VENV)/bin/python -m pytest -q

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Slipstream needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(OLDEST_READY): pyproject.toml constraints.txt
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check $(TORCH)
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > $(OLDEST_VENV)/constraints.txt
	echo 'transformers==$(OLDEST_TRANSFORMERS)' >> $(OLDEST_VENV)/constraints.txt
	$(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check -c $(OLDEST_VENV)/constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-oldest build *.egg-info $(RESULTS)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
