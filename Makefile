# Two commands do everything on a bare Debian 12 (as root): `make up` and `make test`.
# TANDEM_TORCH=cuda make up   takes the CUDA build of torch on a machine with a GPU.

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Processes that test. `make unit` has two more: what is tested against processes mostly waits for them.
WORKERS ?= 2
# What starts no gateway, loads no model and compiles no kernel: thousands of tests of milliseconds.
FAST := tests/test_layout.py tests/unit/operator \
	$(addprefix tests/unit/engine/,disaggregation forward ipc memory messages parallel sampling scheduler) \
	tests/unit/lab/bench tests/unit/lab/simulate $(addprefix tests/unit/services/,cli common router router_server worker) \
	$(addprefix tests/unit/services/gateway/,access openapi queueing tool_parsers)
# Properties of which `make test` tries a tenth of the examples of `make test-long`.
EXAMPLES := tests/property tests/differential/test_random_schedules.py tests/differential/test_faults_and_pauses.py
# Of `make release`: fingerprint of the key of gpg that signs.
KEY ?=
CHAOS_ARGS ?=
# Of `make chaos`: one family of scenarios, such as adapters.
SCENARIO ?=
BENCH_ARGS ?=
export TANDEM_VENV := $(VENV)
# Modules are compiled once, not by each of the hundreds of processes that tests and commands start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help up test test-fast test-long setup setup-runtime check format lint types imports unit front-door test-kube test-neighbours test-tritons release gpu gpu-pack gpu-rehearse verify bench bench-peers chaos limits pairs skew fuzz mutate random-models random-adapters console-shots clients images e2e docs clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 12

up: setup-runtime ## Start gateway, router, Redis, one prefill and one decode worker on the bundled model (ARGS="--decode 2 …")
	@$(BIN)/tandem up $(ARGS)

test: setup lint ## Set up, run every check and every test
	@$(MAKE) --no-print-directory -j2 unit types imports

test-long: setup ## More cases of what `make test` tests with few: before a release, and once a week (tests/README.md)
	$(BIN)/python -m pytest -n $$(($(WORKERS) + 2)) --dist loadgroup -m long $(ARGS)
	TANDEM_EXAMPLES=10 $(BIN)/python -m pytest -n $$(($(WORKERS) + 2)) --dist loadgroup $(EXAMPLES) $(ARGS)

test-fast: setup ## What is tested in milliseconds, nearly half of all tests, in two minutes: for the inner loop
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow and not long" $(FAST) $(ARGS)

setup: ## Install what is missing, for tests as well; a second run does nothing
	@tools/setup.sh dev

setup-runtime: ## Install what `make up` needs, without what tests and checks need
	@tools/setup.sh runtime

check: lint types imports ## Lint, formatting, strict types, import rules

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

unit: setup
	$(BIN)/python -m pytest -n $$(($(WORKERS) + 2)) --dist loadgroup $(ARGS)

front-door: setup ## First starts of a new user: from a wheel, an empty home, and a hub on loopback
	@PYTHONPATH=tests/support $(BIN)/python tools/front_door.py

test-kube: setup ## Tests against a real Kubernetes control plane and with Helm; builds both the first time (15 CPU minutes)
	@tools/kube/setup.sh
	@PIP="$(BIN)/python -m pip" tools/helm/setup.sh
	TANDEM_KUBE_REQUIRED=1 $(BIN)/python -m pytest tests/kube tests/charts $(ARGS)

test-neighbours: setup ## Tests beside Prometheus, an OCI registry and definitions of other projects (docs/neighbours.md)
	@tools/kube/setup.sh
	@PIP="$(BIN)/python -m pip" tools/helm/setup.sh
	@tools/neighbours/setup.sh
	TANDEM_NEIGHBOURS=1 TANDEM_KUBE_REQUIRED=1 $(BIN)/python -m pytest tests/neighbours $(ARGS)

test-tritons: setup ## Machine code of kernels by the Tritons of torch 2.11 and of the CUDA image (a download of 400 MB at first)
	@PIP="$(BIN)/python -m pip" tools/tritons.sh
	TANDEM_TRITONS_REQUIRED=1 $(BIN)/python -m pytest -n $(WORKERS) tests/unit/engine/kernels/test_other_tritons.py $(ARGS)

release: setup ## As root with buildah: charts, all images built twice, bills of materials, signed if KEY=… (docs/release.md)
	@PIP="$(BIN)/python -m pip" tools/helm/setup.sh
	@$(BIN)/python tools/release/charts.py package results/release/charts
	@PYTHON=$(BIN)/python tools/release/images.sh results/release/images --twice $(ARGS)
	@if [ -n "$(KEY)" ]; then $(BIN)/python tools/release/sign.py sign results/release "$(KEY)"; fi

gpu: ## Benchmarks and tests on a GPU, in parts that end by ARGS="--minutes N" (docs/gpu.md); without one it says so
	@tools/gpu.sh $(ARGS)

gpu-pack: setup ## Wheels, a slim NIXL and kernels (by TANDEM_PYTHON) for a GPU machine without a package registry, in kit/
	@tools/gpu_pack.sh $(ARGS)

gpu-rehearse: ## All parts of `make gpu` on a CPU, tiny and interpreted (TANDEM_PYTHON: one with the GPU machine's versions)
	@rm -rf results/gpu-rehearsal
	@tools/gpu.sh --dry-run --minutes 20 --out results/gpu-rehearsal $(ARGS)

format: setup ## Format and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

verify: setup ## Compare Tandem with transformers token by token on the bundled model
	$(BIN)/tandem verify $(ARGS)

bench: setup ## Offline throughput and single-stream latency against transformers
	$(BIN)/tandem bench offline $(ARGS)

bench-peers: setup ## Install vLLM, llama.cpp and others, and run them beside Tandem (BENCH_ARGS="--quick", --json, --help)
	@PYTHONPATH=benchmarks $(BIN)/python -m peers $(BENCH_ARGS)

chaos: setup ## Break a real system in every way it promises to survive (CHAOS_ARGS="--only 1,2", SCENARIO=adapters, --help)
	@PYTHONPATH=tests/support $(BIN)/python -m tandem_testing.chaos $(if $(SCENARIO),--only $(SCENARIO)) $(CHAOS_ARGS)

limits: setup ## Load a system in containers with little memory, few processes, files and CPUs (ARGS="--only memory", --help)
	@PYTHONPATH=tests/support $(BIN)/python -m tandem_testing.limits $(ARGS)

pairs: setup ## Every pair of values of request fields, engine options and flags of fleets (ARGS="--seed N --only fleets")
	@PYTHONPATH=tests/support $(BIN)/python -m tandem_testing.pairs $(ARGS)

skew: setup ## Roll a fleet from older releases, taken from git, to this one under load (ARGS="--old COMMIT", --help)
	@PYTHONPATH=tests/support $(BIN)/python -m tandem_testing.skew $(ARGS)

fuzz: setup ## Ask a gateway a hundred thousand random requests (ARGS="--requests N --seed N --first N")
	@PYTHONPATH=tests/support $(BIN)/python -m tandem_testing.request_fuzz $(ARGS)

mutate: setup ## Change config.json of tiny checkpoints and compare with transformers (ARGS="--model NAME --seed N --json FILE", --help)
	@PYTHONPATH=tests/support $(BIN)/python -m tandem_testing.mutated_configs $(ARGS)

random-models: setup ## Draw models of every family with sizes that no test has, and compare with transformers (ARGS="--family NAME --by fleet", --help)
	@PYTHONPATH=tests/support $(BIN)/python -m tandem_testing.random_models $(ARGS)

random-adapters: setup ## Draw LoRA adapters that PEFT makes and compare with its outputs (ARGS="--family NAME --draws N --seed N --engine")
	@PYTHONPATH=tests/support $(BIN)/python -m tandem_testing.lora_draws $(ARGS)

console-shots: setup ## Take the pictures of docs/console/ again, from a real fleet (needs chromium)
	@PYTHONPATH=tests/support $(BIN)/python tools/console_shots.py $(ARGS)

clients: setup ## Session of a client that does not fit beside the others (LiteLLM), in an environment of its own
	@tools/clients.sh $(ARGS)

images: ## Build the container images with docker, podman or buildah (ARGS="engine-cuda", docker/README.md)
	@docker/build.sh $(ARGS)

e2e: setup ## Serve from pods of a real single-node cluster, as root, and break them under load (CONTRIBUTING.md)
	@tools/kube/e2e.sh $(ARGS)

docs: setup ## Build the documentation as a site in results/docs; a warning is an error
	@$(BIN)/python -m pip install -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q -f tools/docs/mkdocs.yml

clean: ## Remove caches (not the virtual environment)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .tandem
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
