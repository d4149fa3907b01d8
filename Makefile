# Two commands from a fresh clone: `make demo` and `make test`. Everything lands in .venv and .venv-store.
PYTHON ?= python3
ARGS ?=
# Tests wait for processes, disks and clocks a third of their time.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 3 / 2)
PYTEST_ARGS ?= -n $(WORKERS)
# The store's tests run in an order that is drawn; the run prints its seed, and --randomly-seed=N draws it again.
STORE_ORDER ?=
BIN := .venv/bin
SOURCES := ctxcache gpu_worker lab tests scripts
# Long tests first, so that none runs alone at the end.
WORKER_TESTS := $(addprefix tests/,faults live helm lab gpu_worker stories/test_restored_turn.py newcomer/test_readme_turns.py)

# Threads beside torch's own only get in each other's way on the small machines where tests run.
export TOKENIZERS_PARALLELISM ?= false
export OMP_WAIT_POLICY ?= PASSIVE
# Whatever the shell says: each of hundreds of processes would compile the same modules, torch's for five seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo fleet-demo cluster demo-proof bench-table long controls kernels engines engines-ci engines-versions engines-llamacpp engines-lmcache engines-sglang engines-all stable test lint format docs chart image pod proto check-proto mutants storms history neighbour setup setup-store test-store test-worker coverage wheel newcomer resolve clean

help: ## Say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup ## Show what the cache saves on a real small model (ARGS="--help" for its options)
	@$(BIN)/ctxcache demo $(ARGS)

fleet-demo: setup ## Show a conversation on three hosts: every second turn moves, one is killed, one is frozen
	@$(BIN)/python -m lab.demo.fleet $(ARGS)

demo-proof: setup ## Prove on the demo's real model what tests prove on a tiny one (minutes; after `make demo`)
	$(BIN)/python -m pytest -q -rs -p no:cacheprovider tests/lab/demo/smollm2_proof.py

test: lint check-proto test-store test-worker kernels ## Check everything: style, types, contract, and every test once

lint: setup ## Check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/import_law.py
	$(BIN)/python scripts/generate_chart.py --check
	$(BIN)/python scripts/generate_observability.py --check
	$(BIN)/python scripts/generate_client_types.py --check
	$(BIN)/mypy $(SOURCES)
	$(BIN)/mypy --explicit-package-bases $(wildcard tests/engines/*.py tests/faults/*.py tests/faults/plants/*.py tests/fleet/*.py tests/live/*.py tests/mutants/*.py tests/stories/*.py)

format: setup ## Rewrite sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	cd proto && ../$(BIN)/buf format --write

docs: ## Build the documentation site into build/site, strictly (mkdocs-material, in .venv-docs)
	@$(PYTHON) scripts/setup.py docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

chart: setup ## Write the chart's README, schema and renders
	$(BIN)/python scripts/generate_chart.py

image: setup ## Build the images by buildah, where no container engine runs (root; ARGS="store" for one of them)
	$(BIN)/python scripts/build_image.py $(ARGS) || test $$? = 77

pod: setup ## Run the images and the chart's pods by bubblewrap, as a kubelet does (root; after `make image`)
	$(BIN)/python -m pytest -q -rs tests/helm/pod_matrix.py

proto: setup ## Generate the Python code of proto/, and the client's plain types
	$(BIN)/python scripts/generate_proto.py
	$(BIN)/python scripts/generate_client_types.py

check-proto: setup
	scripts/check_proto.sh

# The store must import, serve and pass its tests where torch does not exist.
test-store: setup-store
	@command -v node >/dev/null || echo 'NOTICE: node is not installed: the JavaScript client test will be SKIPPED' >&2
	@command -v promtool >/dev/null || test -x .tools/promtool || echo 'NOTICE: promtool is not there: alerts and panels will be SKIPPED; scripts/get_promtool.sh fetches it' >&2
	@command -v chromium >/dev/null || echo 'NOTICE: chromium is not installed: the status page will not be looked at in a browser' >&2
	.venv-store/bin/python -c 'import importlib.util as u, sys; sys.exit(bool(u.find_spec("torch")) and "torch is installed in .venv-store")'
	.venv-store/bin/python -m pytest $(STORE_ORDER) $(addprefix --ignore=,$(WORKER_TESTS)) $(PYTEST_ARGS)

coverage: setup ## Say which branches of core/ and cache/ no test of theirs or of the service takes (ten minutes; pages in build/coverage)
	$(BIN)/python -m pytest -q -p no:randomly $(PYTEST_ARGS) --cov=ctxcache.core --cov=ctxcache.cache --cov-branch \
	  --cov-report=html:build/coverage --cov-report=term:skip-covered tests/core tests/cache tests/service

# The worker, and what drives store and worker together.
test-worker: setup
	$(BIN)/python -m pytest -p no:randomly $(WORKER_TESTS) $(PYTEST_ARGS)

kernels: setup ## Compile the worker's kernels for an H100, as their tests launch them; needs no GPU (a minute)
	cd tests/gpu_worker/kernels && PYTHONPATH=.:../../.. ../../../$(BIN)/python -m pytest -q -p compile_only -p no:cacheprovider -p no:randomly \
	  -c /dev/null --rootdir . --confcutdir . -o asyncio_default_fixture_loop_scope=function $(PYTEST_ARGS) .

cluster: setup ## Three stores, SeaweedFS and ten sorts of faults (minutes; ARGS="--faults 100")
	$(BIN)/python -m tests.fleet.cluster $(ARGS)

history: setup ## Let many clients change the same sessions under kills and power cuts, and check every answer (an hour; HISTORY_ARGS="--seed 7")
	$(BIN)/python -m tests.faults.history --acts 300 $(HISTORY_ARGS)
	$(BIN)/python -m tests.faults.history --acts 150 --power $(HISTORY_ARGS)

neighbour: setup ## Attack a server as one tenant and time another one's small calls (minutes; NEIGHBOUR_ARGS="--attack fork --rounds 5")
	$(BIN)/python -m tests.faults.neighbour $(NEIGHBOUR_ARGS)

long: setup ## Run what `make test` has in short: fault harnesses and live placement at their whole size (minutes; ARGS="-k crash")
	$(BIN)/python -m pytest -q -rs -p no:cacheprovider -p no:randomly -m long tests/faults tests/live $(ARGS)

controls: setup ## Plant every bug that a fault harness must find, and see that it does (half an hour; ARGS="--harness crash")
	@$(BIN)/python -m tests.faults.controls $(ARGS)

storms: setup ## Let all that a store does go on at once, with power cuts and faults, 300 seeds of each kind (ten minutes; SEEDS=1000)
	CTXCACHE_STORM_SEEDS=$(or $(SEEDS),300) $(BIN)/python -m pytest -q -p no:cacheprovider tests/cache/test_cache_storm.py tests/cache/test_cache_operated.py $(PYTEST_ARGS)

mutants: setup ## Change one line of the store at a time and see that the tests notice (half an hour on two cores; ARGS="--help")
	@$(BIN)/python -m tests.mutants.run $(ARGS)

engines: ## Run real engines on a real store: vLLM, LMCache, SGLang's cache and llama.cpp on a CPU, environments made first (30 minutes; ARGS="-k killed")
	@$(PYTHON) scripts/run_engines.py -- $(ARGS)

engines-ci: ## The part of it that CI runs: vLLM with prefixes, sessions, eviction, a store stopped and killed (two minutes)
	@$(PYTHON) scripts/run_engines.py vllm-ci -- $(ARGS)

engines-versions: ## Run what each version of vLLM, LMCache, SGLang and llama.cpp must do with a store, each in an environment of its own, and write the tables of their pages (an hour; ARGS="vllm lmcache==0.5.4 --keep DIR")
	@$(PYTHON) scripts/engine_versions.py $(ARGS)

engines-llamacpp: ## The part of it that is llama.cpp (a minute)
	@$(PYTHON) scripts/run_engines.py llamacpp -- $(ARGS)

engines-lmcache: ## The part of it that is LMCache's second tier and remote storage (two minutes)
	@$(PYTHON) scripts/run_engines.py lmcache -- $(ARGS)

engines-sglang: ## The part of it that is SGLang's hierarchical cache, without its engine (a minute)
	@$(PYTHON) scripts/run_engines.py sglang -- $(ARGS)

engines-all: ## The same with 50 kills, and with small models of 19 types (an hour)
	CTXCACHE_KILLS=50 $(MAKE) engines ARGS="--timeout 1800 $(ARGS)"
	.venv-vllm/bin/python -m lab.engines.families

bench-table: setup ## Measure every path on this machine, which nothing else uses, and write results and lab/notes/bench.md (an hour; ARGS="--rounds 3")
	@mkdir -p build
	$(BIN)/ctxcache bench --json $(ARGS) > build/bench.json
	cp build/bench.json lab/results/$$(date +%F)-bench.json
	$(BIN)/python -m lab.bench.report lab/results/$$(date +%F)-bench.json lab/notes/bench.md

resolve: setup ## Ask whether the wheel can be installed beside each engine that the documents name (a minute; needs an index)
	$(BIN)/python scripts/check_resolves.py $(ARGS)

stable: setup-store ## Run `make test` 20 times, 10 of them beside two busy loops (hours; ARGS="--resume" after an interruption)
	$(BIN)/python scripts/repeat_tests.py $(ARGS)

wheel: ## Make the wheel that people install into dist/, and print its path (needs pip, and its index for hatchling)
	@rm -f dist/ctxcache-*.whl
	@$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/ctxcache-*.whl

newcomer: setup ## Install in fresh environments as the documents say, then type every page's commands without a network (minutes; needs pip's index)
	$(BIN)/python -m pytest -q -rs -p no:cacheprovider -p no:randomly tests/newcomer/fresh_environments.py tests/newcomer/pages_in_order.py $(ARGS)

setup: ## Make .venv, with everything (no network once it is made)
	@$(PYTHON) scripts/setup.py worker

setup-store: setup
	@$(PYTHON) scripts/setup.py store

clean: ## Remove the environments and the tools' caches, not the models
	rm -rf .venv .venv-store .venv-docs .venv-vllm .venv-llamacpp .venv-lmcache .venv-sglang build/site .mypy_cache .ruff_cache .pytest_cache
