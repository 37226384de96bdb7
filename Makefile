# People and CI use the same targets; each installs what it needs, once.
#   make serve | test | quick | check | docs | bench | accept-engine | accept-gang | accept-proposers | accept-serving |
#        accept-cluster | accept-exactness | accept-gpu | openvino-peer | clean
# `make quick` runs ruff and the fast tests, in about a minute; SLOW_TESTS below lists the tests that it leaves out.
# VENV and PYTHON may be given: `make test VENV=/path/to/venv PYTHON=python3.12`.

PYTHON ?= python3
VENV ?= .venv
OLDEST_VENV ?= .venv-oldest
OLDEST_TRANSFORMERS := 5.17.0
GPU_PYTHON ?= $(PYTHON)
OPENVINO_VENV ?= .venv-openvino
OPENVINO_PYTHON ?= $(wildcard $(OPENVINO_VENV)/bin/python)
ARGS ?=
# `make test` runs the tests in so many processes.
WORKERS ?= 2
FUZZ ?= 100000

BIN := $(VENV)/bin
READY := $(VENV)/.slipstream-installed
DOCS_READY := $(VENV)/.slipstream-docs-installed
OLDEST_READY := $(OLDEST_VENV)/.slipstream-installed
OPENVINO_READY := $(OPENVINO_VENV)/.openvino-installed
TORCH := $(shell grep '^torch==' constraints.txt)
RESULTS := benchmarks/results

TWO_THREADS := OMP_NUM_THREADS=2

# Left out of `make quick`: tests with Ray, with child processes or servers, and with models that take seconds.
SLOW_TESTS := tests/ray tests/ray_serve tests/distributed tests/exactness tests/invariant tests/seeds tests/http tests/grpc \
	tests/cluster/deploy tests/cluster/test_bench_serve.py tests/cluster/test_check_command.py tests/cluster/cli \
	tests/cluster/test_doctor.py tests/cluster/test_fresh_clone.py tests/cluster/test_llm.py \
	tests/cluster/test_process_workers.py tests/docs/test_snippets.py tests/proposers/demo_heads \
	tests/gpu tests/proposers/formats/test_drafter_traps.py tests/proposers/test_every_proposer.py \
	tests/proposers/test_model_free_engine.py tests/proposers/test_own_proposer.py tests/proposers/test_trees.py \
	tests/runtime/test_async_engine.py tests/runtime/core/test_scheduler_machine.py tests/structured/test_engine.py \
	tests/workers/attention tests/workers/distributed tests/workers/draft tests/workers/gpu tests/workers/model \
	tests/workers/quantization/test_experts.py tests/workers/recurrent tests/workers/sampling \
	tests/workers/verification/test_rejection_engine.py tests/workers/weights/test_published.py

# What each acceptance runs. The engine's runs what no other one does.
WORKER_GROUP_TESTS := tests/distributed tests/ray tests/workers/distributed tests/cluster/test_process_workers.py \
	tests/cluster/test_doctor.py
PROPOSER_TESTS := tests/proposers tests/seeds tests/workers/draft tests/workers/attention tests/workers/model
SERVING_TESTS := tests/http tests/grpc tests/docs tests/structured tests/ray_serve tests/cluster/test_bench_serve.py \
	tests/cluster/deploy tests/runtime/test_logs.py tests/runtime/core/test_timing.py \
	tests/runtime/test_monitoring_files.py
CLUSTER_TESTS := tests/ray/test_machines.py tests/ray/test_machine_faults.py tests/ray/test_ray_up.py \
	tests/ray/test_rollout.py tests/ray/test_chaos.py
EXACTNESS_TESTS := tests/exactness tests/invariant tests/workers/verification tests/cluster/test_check_command.py \
	tests/cluster/test_check_identity.py tests/cluster/test_check_distribution.py

.PHONY: install serve test quick protos check docs bench accept-engine accept-gang accept-proposers accept-serving accept-cluster \
	accept-exactness accept-gpu accept-oldest openvino-peer clean

serve: $(READY)
	$(BIN)/slipstream serve $(ARGS)

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

quick: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(TWO_THREADS) $(BIN)/python -m pytest $(addprefix --ignore=,$(SLOW_TESTS)) $(ARGS)

# The floors of grpcio and protobuf in pyproject.toml follow the version of grpcio-tools.
protos: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/slipstream_v1.proto

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A site in build/site. Strict: a dead link, also from README and CONTRIBUTING, fails. Needs no network once installed.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -q tests/docs

bench: $(READY)
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.engine --output $(RESULTS)/engine.json $(ARGS)
	$(BIN)/python -m benchmarks.off_is_free --output $(RESULTS)/off_is_free.json
	$(BIN)/python -m benchmarks.proposers --output $(RESULTS)/proposers.json
	$(BIN)/python -m benchmarks.neighbour --output $(RESULTS)/neighbour.json
	$(BIN)/python -m benchmarks.openvino_peer $(addprefix --peer-python=,$(OPENVINO_PYTHON)) \
		--output $(RESULTS)/openvino_peer.json

accept-engine: check accept-oldest
	$(TWO_THREADS) $(BIN)/python -m pytest -m full -s $(addprefix --ignore=,$(WORKER_GROUP_TESTS) $(PROPOSER_TESTS) \
		$(SERVING_TESTS) $(EXACTNESS_TESTS))
	$(MAKE) bench

# Several processes a test on as many processors as there are: one thread each.
accept-gang: check
	mkdir -p $(RESULTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m full -s $(WORKER_GROUP_TESTS) $(addprefix --ignore=,$(CLUSTER_TESTS))
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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "full or not full" -s $(SERVING_TESTS) --fuzz-requests $(FUZZ)
	$(BIN)/python -m benchmarks.overload --threads 1 --output $(RESULTS)/overload.json
	$(BIN)/python -m benchmarks.http_overhead --output $(RESULTS)/http_overhead.json

# Skipped, with the reason, where machines of namespaces cannot be made: see CONTRIBUTING.md.
accept-cluster: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "full or not full" -s $(CLUSTER_TESTS) --chaos-minutes 20
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.fleet.split_gang --blocks 10 --output $(RESULTS)/split_gang.json

accept-exactness: check
	mkdir -p $(RESULTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "full or not full" -s $(EXACTNESS_TESTS)
	$(BIN)/python -m benchmarks.acceptance --output $(RESULTS)/acceptance.json
	$(BIN)/python -m benchmarks.invariance --prompts 500 --tokens 256 --share 42 --plain-prompts 32 \
		--output $(RESULTS)/invariance.json

# The oldest transformers that is promised, in an environment of its own.
# For a machine with GPUs: GPU_PYTHON has torch for CUDA, triton and this project, with or without Ray.
accept-gpu:
	mkdir -p $(RESULTS)
	$(GPU_PYTHON) -m cluster.cli.main doctor --gpu --full --output $(RESULTS)/gpu.json

accept-oldest: $(OLDEST_READY)
	$(TWO_THREADS) $(OLDEST_VENV)/bin/python -m pytest -q

# What `make bench` compares with where it is there, in an environment of its own.
openvino-peer: $(OPENVINO_READY)

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Slipstream needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(OLDEST_READY): pyproject.toml constraints.txt
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check $(TORCH)
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > $(OLDEST_VENV)/constraints.txt
	echo 'transformers==$(OLDEST_TRANSFORMERS)' >> $(OLDEST_VENV)/constraints.txt
	$(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check -c $(OLDEST_VENV)/constraints.txt -e '.[dev]'
	touch $@

# Without torchvision, which must be of torch's own build, and is for images.
$(OPENVINO_READY): benchmarks/openvino_requirements.txt
	test -x $(OPENVINO_VENV)/bin/python || $(PYTHON) -m venv $(OPENVINO_VENV)
	$(OPENVINO_VENV)/bin/python -m pip install --disable-pip-version-check $(TORCH)
	$(OPENVINO_VENV)/bin/python -m pip install --disable-pip-version-check -r $<
	$(OPENVINO_VENV)/bin/python -m pip uninstall --yes torchvision
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-openvino build *.egg-info $(RESULTS)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
