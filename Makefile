# kcoord: `make help` lists the targets. Every target makes the environment it needs by itself.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 4
SHARED ?= ../shared
ARGS ?=
KILLS ?= 1000
ROUNDS ?= 10
REQUESTS ?= 100000
SOAK_TESTS := tests/soak tests/fuzz/test_decoder.py tests/fuzz/test_live.py tests/integration/lake/test_many_keys.py \
	tests/integration/test_hostile_logins.py tests/integration/clients/test_upstream_security.py
IMAGE ?= kcoord:dev
SPARK_IMAGE ?= kcoord-spark:dev
SEED ?= 0
INSTANCES ?= 3
STATES ?= 1000000
BASE_IMAGE ?= python:3.13-slim-bookworm

BIN := $(VENV)/bin
RUN := $(VENV)/.run-stamp
COMPILED := $(VENV)/.compiled-stamp
DEV := $(VENV)/.dev-stamp
FUZZ := $(VENV)/.fuzz-stamp
DOCS := $(VENV)/.docs-stamp
MERMAID := docs/javascripts/mermaid.min.js
VALE := $(VENV)/bin/vale
# Texts whose language is checked.
PROSE := README.md CONTRIBUTING.md CHANGELOG.md docs schemas/README.md protocol bench examples kcoord tests
MKDOCS := env NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Byte code ahead of time: a start must not pay for it where PYTHONDONTWRITEBYTECODE is set or the folder is read-only.
COMPILE := $(BIN)/python -m compileall -q kcoord protocol
LOCK := $(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-header --no-annotate

export KCOORD_SHARED := $(abspath $(SHARED))

# Facts recorded from Apache Kafka are not part of the sources. $(call needs,PATH,WITHOUT) ends a target that reads them.
needs = @test -e "$(SHARED)/$(1)" || { printf '%s\n' "make $@ reads $(1) in a folder of facts recorded from Apache Kafka." \
	"$(SHARED)/$(1) does not exist. Set SHARED=FOLDER if you have the folder elsewhere." "Without it: $(2)." >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help run test test-clients peersuite check lint types imports shape spelling prose format generate generate-check simulate model-check soak failover exactly-once clients-before-kafka fuzz mutate conformance transcripts authorization vectors schemas-check bench bench-check bench-peers \
	docker docker-test docker-spark docker-spark-test docs docs-serve spark-archive live-lake lock env clean

help: ## this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F ':.*?## ' '{printf "  %-20s %s\n", $$1, $$2}'

run: $(COMPILED) ## start kcoord on 127.0.0.1:9092 with data under ./kcoord-data (ARGS="--override key=value ...")
	@$(COMPILE)
	@exec env -u KCOORD_SHARED $(BIN)/kcoord serve $(ARGS)

test: $(DEV) ## all tests (WORKERS=4 processes, because many tests wait; ARGS="tests/unit -k offsets" for some; without SHARED=../shared some are skipped)
	@$(COMPILE)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(ARGS)

test-clients: $(DEV) ## Kafka's Java client (Maven) and franz-go (Go's module proxy) in groups (ARGS=java or ARGS=go for one)
	$(BIN)/python -m tests.clients $(ARGS)

peersuite: $(DEV) ## Kafka 4.3.1's own integration tests against kcoord, an hour (ARGS="--suite wire --classes JoinGroup"; needs SHARED=../shared; without: make test-clients)
	$(call needs,peersuite/run.sh,make test-clients runs Kafka's Java client against kcoord)
	$(BIN)/python -m tests.conformance.peersuite $(ARGS)

transcripts: $(DEV) ## the transcripts of tests/transcripts on Apache Kafka, five minutes (ARGS="tests/transcripts/classic/rejoin.txt" for some; needs SHARED=../shared; without: make test ARGS=tests/transcripts)
	$(call needs,anchors/kafka/run.sh,make test ARGS=tests/transcripts plays them on kcoord)
	$(BIN)/python -m tests.transcripts.kafka $(ARGS)

check: lint types imports generate-check shape spelling prose ## everything but tests: lint, types, rings, generated files, shape, language

lint: $(DEV) ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV) ## mypy --strict
	$(BIN)/mypy

imports: $(DEV) ## the rings of docs/architecture.md
	$(BIN)/lint-imports

shape: $(DEV) ## files that a heartbeat passes, functions that only forward, modules per folder, import circles; fail above the limits
	$(BIN)/python -m tests.shape

spelling: $(DEV) ## misspelt words in code and texts, found by codespell
	$(BIN)/codespell

prose: ## words of docs/styles in documents, docstrings and comments, found by Vale (needs Go to build it; skipped without)
	@command -v go >/dev/null || { echo "make prose needs Go: skipped" >&2; test -z "$$KCOORD_REQUIRE_ALL"; }
	@! command -v go >/dev/null || { $(MAKE) --no-print-directory $(VALE) && $(VALE) --config docs/.vale.ini --output line $(PROSE); }

format: $(DEV) ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(DEV) ## write generated files again: types of the messages and of the configuration, reference pages of keys, APIs, rights, metrics and tables
	$(BIN)/python -m kcoord_protocol.stubs
	$(BIN)/python docs/make_configuration.py
	$(BIN)/python docs/make_pipeline_tables.py
	$(BIN)/python docs/make_lake_tables.py
	$(BIN)/python docs/make_apis.py
	$(BIN)/python docs/make_acls.py
	$(BIN)/python docs/make_metrics.py

generate-check: $(DEV) ## fail where a generated file is not what its source says
	$(BIN)/python -m kcoord_protocol.stubs --check
	$(BIN)/python docs/make_configuration.py --check
	$(BIN)/python docs/make_pipeline_tables.py --check
	$(BIN)/python docs/make_lake_tables.py --check
	$(BIN)/python docs/make_apis.py --check
	$(BIN)/python docs/make_acls.py --check
	$(BIN)/python docs/make_metrics.py --check

soak: $(DEV) ## long forms of tests: kill -9 1000 times, other real faults 10 times, more hostile requests; half an hour (KILLS=1000 ROUNDS=10 REQUESTS=100000; KCOORD_SOAK_SEED=... repeats)
	KCOORD_SOAK_KILLS=$(KILLS) KCOORD_SOAK_ROUNDS=$(ROUNDS) KCOORD_FUZZ_REQUESTS=$(REQUESTS) \
		KCOORD_FUZZ_INPUTS=2000000 KCOORD_LAKE_KEYS=1010000 KCOORD_HOSTILE_CONNECTIONS=10000 \
		$(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 $(SOAK_TESTS) $(ARGS)

failover: $(DEV) ## instances in front of kcoord and of Apache Kafka that are killed, stopped, paused and cut off, with 2,000 members and 1,000,000 offsets; needs root; ten minutes
	FAILOVER=long $(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 tests/failover tests/integration/upstream/test_compose.py $(ARGS)

exactly-once: $(DEV) ## applications that process exactly once through two instances in front of kcoord and of Apache Kafka, while applications, instances and brokers are killed and paused; a quarter of an hour
	EXACTLY_ONCE=long $(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 tests/exactly_once $(ARGS)

clients-before-kafka: $(DEV) ## all kinds of unchanged clients in front of Apache Kafka 4.3.1 and 3.9.1, through instances of which one is killed every 20 s; needs Go; ten minutes (INSTANCES=3)
	CLIENTS=long INSTANCES=$(INSTANCES) $(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 tests/clients_before_kafka $(ARGS)

fuzz: $(FUZZ) ## coverage-guided fuzzing of the decoders with atheris, a minute each (ARGS="requests --seconds 600 --keep"; Linux on x86-64)
	$(BIN)/python -m tests.fuzz.guided $(ARGS)

mutate: $(DEV) ## mutants of the core, storage or client that the tests have to kill (ARGS="--count 60 --seed 1"; --package client; --list; --only FILE:LINE)
	$(BIN)/python -m tests.mutation $(ARGS)

simulate: $(RUN) ## the deterministic simulation on all cores until stopped (SEED=0 to begin with; ARGS="--scenario storm")
	$(BIN)/kcoord simulate --forever $(SEED) --processes 0 $(ARGS)

model-check: $(RUN) ## all states of small groups, a million of them (STATES=1000000)
	$(BIN)/kcoord model-check --states $(STATES) --processes 2 $(ARGS)

conformance: $(DEV) ## the dialogues recorded from Apache Kafka 4.3.1 and 4.4.0 against a fresh kcoord (needs SHARED=../shared; without: make test ARGS=tests/transcripts)
	$(call needs,conformance/golden.py,make test ARGS=tests/transcripts plays dialogues whose responses are compared with Kafka's)
	$(BIN)/python -m pytest -q tests/conformance $(ARGS)

authorization: $(DEV) ## the rights, users and failed logins of all APIs on Apache Kafka 4.4.0 and kcoord, a minute (needs SHARED=../shared; without: make test ARGS=tests/unit/security)
	$(call needs,anchors/kafka/run.sh,make test ARGS=tests/unit/security compares the authorizer with the description)
	KCOORD_REQUIRE_ALL=1 $(BIN)/python -m pytest -q tests/integration/clients/test_acl_decisions.py $(ARGS)

vectors: $(RUN) ## decode and encode the byte vectors of Apache Kafka 4.3.1's and 4.4.0's serializers (needs SHARED=../shared; without: make test ARGS=tests/protocol)
	$(call needs,kafka-facts-4.4.0/vectors.jsonl.gz,make test ARGS=tests/protocol tests the codec)
	$(BIN)/python -m kcoord_protocol.vectors $(SHARED)/kafka-facts/vectors.jsonl.gz $(SHARED)/kafka-facts-4.4.0/vectors.jsonl.gz

schemas-check: $(RUN) ## compare schemas/ with the wire layouts of Apache Kafka 4.4.0 (needs SHARED=../shared; without: make test ARGS=tests/protocol)
	$(call needs,tools/check_schemas.py,make test ARGS=tests/protocol/test_schema_files.py checks the schemas themselves)
	$(BIN)/python $(SHARED)/tools/check_schemas.py schemas $(SHARED)/kafka-facts-4.4.0

bench: $(DEV) ## figures of docs/performance.md, about 15 minutes (ARGS="requests storm --json FILE" for some)
	@$(COMPILE)
	$(BIN)/python -m bench $(ARGS)

bench-check: $(COMPILED) ## fail where a request costs far more CPU than it should, as a ratio to an echo; under a minute
	@$(COMPILE)
	$(BIN)/python -m bench.check

bench-peers: $(COMPILED) ## Kafka and kfake beside kcoord, half an hour or more (ARGS="--only kfake"; needs SHARED=../shared; without: make bench)
	$(call needs,bench/run-anchors.sh,make bench measures kcoord alone)
	@$(COMPILE)
	$(BIN)/python -m bench.peers $(ARGS)

docs: $(DOCS) $(MERMAID) ## build the documentation site into docs/site; a broken link fails (needs npm for the script of the diagrams)
	$(MKDOCS) build --quiet --config-file docs/mkdocs.yml

docs-serve: $(DOCS) $(MERMAID) ## show the documentation site on 127.0.0.1:8000 while you write
	$(MKDOCS) serve --config-file docs/mkdocs.yml

docker: ## build the image (BASE_IMAGE=python:3.13-slim-bookworm IMAGE=kcoord:dev)
	docker build --build-arg BASE_IMAGE=$(BASE_IMAGE) --tag $(IMAGE) --file docker/Dockerfile .

docker-test: $(DEV) ## build the image and use it with a real client (needs Docker; without it, a script of SHARED=../shared may start it)
	$(BIN)/python -m tests.docker.container $(IMAGE)

docker-spark: ## build the image of the data pipeline, 2 GB (BASE_IMAGE=python:3.13-slim-bookworm SPARK_IMAGE=kcoord-spark:dev)
	docker build --build-arg BASE_IMAGE=$(BASE_IMAGE) --tag $(SPARK_IMAGE) --file docker/spark.Dockerfile .

docker-spark-test: $(DEV) ## build the image of the data pipeline, and run a lake on a cluster of its containers; some minutes (needs Docker, as docker-test)
	$(BIN)/python -m tests.docker.spark_image $(SPARK_IMAGE)

spark-archive: $(RUN) ## dist/kcoord-spark.tar.gz: kcoord and its libraries for the workers of a Spark cluster (spark-submit --archives)
	rm -rf build/spark && mkdir -p dist
	$(PIP) install --require-hashes --no-compile --target build/spark -r requirements/spark.lock
	$(PIP) install --no-deps --no-build-isolation --no-compile --target build/spark .
	rm -rf build/spark/pyspark* build/spark/py4j* build/spark/bin
	tar --create --gzip --file dist/kcoord-spark.tar.gz --directory build/spark .

live-lake: $(DEV) spark-archive ## a lake on a Spark cluster that follows live brokers while brokers, workers, the driver and compactions are killed; eleven minutes (ARGS="--brokers kafka3 --move-leaders --seconds 120")
	$(BIN)/python -m tests.live_lake --archive dist/kcoord-spark.tar.gz $(ARGS)

lock: $(DEV) ## resolve the dependencies again and write requirements/*.lock
	$(LOCK) --upgrade --output-file requirements/run.lock
	$(LOCK) --constraint requirements/run.lock --extra dev --output-file requirements/dev.lock
	$(LOCK) --constraint requirements/dev.lock --extra spark-fast --extra delta --extra iceberg --output-file requirements/spark.lock
	$(LOCK) --constraint requirements/dev.lock --extra fuzz --output-file requirements/fuzz.lock
	$(LOCK) --constraint requirements/dev.lock --extra docs --output-file requirements/docs.lock
	printf '%s\n' hatchling mypy setuptools | $(subst pyproject.toml,-,$(LOCK)) --constraint requirements/dev.lock --output-file requirements/build.lock

env: $(DEV) ## make the development environment only

clean: ## remove the environment, caches and build results (not ./kcoord-data)
	rm -rf $(VENV) $(MERMAID) protocol/kcoord_protocol/compiled_record_check*.so build dist docs/site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .mutation_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kcoord needs Python 3.11 or newer; $(PYTHON) is older (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUN): requirements/run.lock requirements/build.lock pyproject.toml | $(BIN)/python
	$(PIP) install --require-hashes -r requirements/build.lock -r requirements/run.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	$(COMPILE)
	@touch $@

# Without a C compiler the pure form is used.
$(COMPILED): protocol/hatch_build.py protocol/kcoord_protocol/record_check.py $(RUN)
	$(BIN)/python protocol/hatch_build.py
	@touch $@

$(DEV): requirements/dev.lock requirements/spark.lock $(COMPILED)
	$(PIP) install --require-hashes -r requirements/dev.lock -r requirements/spark.lock
	@touch $@

$(FUZZ): requirements/fuzz.lock $(DEV)
	$(PIP) install --require-hashes -r requirements/fuzz.lock
	@touch $@

$(DOCS): requirements/docs.lock $(DEV)
	$(PIP) install --require-hashes -r requirements/docs.lock
	@touch $@

# The site ships the script, so that no page loads anything from another host.
$(MERMAID): requirements/mermaid.sha256
	mkdir -p $(@D)
	npm pack --silent --pack-destination $(VENV) mermaid@11.6.0
	tar --extract --gzip --to-stdout --file $(VENV)/mermaid-11.6.0.tgz package/dist/mermaid.min.js > $@
	sha256sum --check --quiet requirements/mermaid.sha256 || { rm -f $@; exit 1; }

$(VALE): | $(BIN)/python
	GOBIN=$(abspath $(VENV))/bin go install github.com/errata-ai/vale/v3/cmd/vale@v3.7.1
