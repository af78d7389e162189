# SPDX-License-Identifier: Apache-2.0
#
# make only shortens commands: go build ./... and go test ./... work with Go alone.

GO ?= go
# The flags of released binaries for every program and test, so that they share the build cache.
export CGO_ENABLED := 0
export GOFLAGS := $(GOFLAGS) -trimpath
BUILD = $(GO) build
# Development tools, pinned in a module of their own.
TOOL = $(GO) tool -modfile=$(CURDIR)/.ci/go.mod

# Without HOME, Go has no place for its caches.
ifeq ($(strip $(HOME)),)
export HOME := $(CURDIR)/bin/home
export GOFLAGS := $(GOFLAGS) -modcacherw
endif

.DEFAULT_GOAL := help
.PHONY: help build demo recording pictures repro test corpus test-sandbox escape interop peers farm faults vm rules fuzz lint race cross library api bench \
	soak scale queue grow store neighbours cost golden serve package packaging reference build-files self-build clean tools gvisor kernel qemu msb example

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

build: ## compile bin/cloister
	$(BUILD) -o bin/cloister ./cmd/cloister

gvisor: ## compile bin/runsc, the gVisor of --sandbox gvisor (once: 2 minutes)
	cd sandbox/gvisor/runsc && $(BUILD) -ldflags '-s -w' -o $(CURDIR)/bin/runsc gvisor.dev/gvisor/runsc

demo: build tools ## build and test the example remotely, twice, and attack the sandbox (3 minutes)
	$(BUILD) -o bin/demo ./tests/demo
	@bin/demo -cloister bin/cloister

gate-example: ## run the gate on examples/gate and write its report into the README there
	$(GO) test -count=1 ./tests/cli -run '^TestGateExample$$' -update

recording: build tools ## run the demo and record it in docs/demo.svg
	$(BUILD) -o bin/demo ./tests/demo
	@bin/demo -cloister bin/cloister -svg docs/demo.svg

repro: build tools ## build the example remotely and check that each action is reproducible (5 minutes)
	$(BUILD) -o bin/demo ./tests/demo
	@bin/demo -cloister bin/cloister -repro bin/repro.md

# The slowest begin first. Most packages wait for other processes, so there are two at a time for each processor.
PACKAGES ?= ./tests/bazel ./tests/reapi ./tests/cli ./...
AT_ONCE ?= $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN))))

# RERUNS=1 runs failed tests once more, unless they are many or race for data, and lists those that then pass in
# bin/flaky-*.txt. Failures other than of tests remain.
RERUNS ?= 0
GOTESTSUM = $(TOOL) gotestsum --format pkgname --format-hide-empty-pkg --rerun-fails=$(RERUNS) --rerun-fails-max-failures=6 \
	--rerun-fails-run-root-test --rerun-fails-abort-on-data-race --rerun-fails-report $(CURDIR)/bin/flaky-$@.txt \
	--jsonfile $(CURDIR)/bin/events-$@.json

# make lint vets. Without debug information, a test links in half the time.
LINKED = -ldflags='-s -w'

test: tools ## run all tests and list the skipped ones with their reasons
	@mkdir -p bin
	$(GOTESTSUM) --packages "$(PACKAGES)" -- $(LINKED) -vet=off -p $(AT_ONCE) -timeout 30m
	@.ci/ended bin/events-$@.json

corpus: tools ## check the causes and factors that repro finds in all programs of its corpus (3 minutes)
	@mkdir -p bin
	$(GOTESTSUM) --packages ./tests/repro -- $(LINKED) -vet=off -timeout 30m -args -all
	@.ci/ended bin/events-$@.json

# These tests measure allocations, which the race detector increases.
NORACE = ^(TestHostileProgramsTakeLimitedMemory)$$

# In other packages nothing runs concurrently, neither in the code nor in its tests.
CONCURRENT = grep -rlE --include='*.go' --exclude-dir=testdata --exclude-dir=packaging \
	'^[^/]*\bgo (func|[A-Za-z.]+)\(|\.Go\(|"sync(/atomic)?"|t\.Parallel\(\)' cas sandbox worker cmd | xargs -n 1 dirname | sort -u

race: ## run the unit tests of packages with goroutines or locks with the race detector (needs a C compiler)
	@mkdir -p bin
	CGO_ENABLED=1 $(GOTESTSUM) --packages "$$($(CONCURRENT) | sed 's|^|./|' | tr '\n' ' ')" -- \
		$(LINKED) -race -short -vet=off -p $(AT_ONCE) -timeout 40m -skip '$(NORACE)'
	@.ci/ended bin/events-$@.json

test-sandbox: ## run the sandbox tests; fail where this machine cannot confine
	CLOISTER_REQUIRE=namespaces $(GO) test -count=1 ./sandbox/...

SOAK ?= 400
ATTACKS ?= ^(TestEscapes|TestEscapesFromGVisor|TestSoak)$$

escape: ## run hostile programs and print the guarantees (SOAK=10000: among as many other runs; ATTACKS=.: all)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 30m -v -run '$(ATTACKS)' ./tests/escape -args -soak=$(SOAK) > bin/escape.log; code=$$?; \
	if [ $$code = 0 ]; then grep -E '^ +(held|skipped|FAILED) |guarantees of|after as before|runs,' bin/escape.log; else cat bin/escape.log; fi; exit $$code

cost: ## measure a run in namespaces, in gVisor and in an emulated machine (after make gvisor kernel; 10 minutes)
	CLOISTER_REQUIRE=qemu $(GO) test -run '^$$' -bench '^BenchmarkBackends$$' -benchtime 50x -timeout 30m ./tests/escape

neighbours: ## measure a compile beside actions that take as much as they can (4 minutes on an idle machine)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 60m -v -run '^TestNeighbours$$' ./tests/escape -args -neighbours=5 > bin/neighbours.log; code=$$?; \
	if [ $$code = 0 ]; then sed -n 's/^.*neighbours: //p' bin/neighbours.log; else cat bin/neighbours.log; fi; exit $$code

interop: ## test with real bazel-remote, Buildbarn and S3 servers, clients and Chromium; list skipped tests (builds the servers once: 7 minutes)
	@.ci/tools browser
	@mkdir -p bin
	cd tests/interop && $(GOTESTSUM) --packages ./... -- -count=1 -parallel 6 -timeout 60m
	@.ci/ended bin/events-$@.json

pictures: ## take the pictures of docs/console.md with Chromium
	@.ci/tools browser
	cd tests/interop && $(GO) test -count=1 -run '^TestConsoleInABrowser$$' . -args -pictures=$(CURDIR)/docs

peers: ## build the programs that make interop uses
	cd tests/interop && $(GO) test -vet=off -count=1 -timeout 60m -run '^TestProgramsCompile$$' .

CUT ?= 90s

farm: tools ## build with three workers; kill one, drain one, cut one off for CUT=90s (3 minutes)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 30m -v -run '^TestBuildSurvivesTheLossOfWorkers$$' ./tests/farm -args -cut=$(CUT) > bin/farm.log; code=$$?; \
	if [ $$code = 0 ]; then sed -n 's/^ *build_linux_test.go:[0-9]*: //p' bin/farm.log; else cat bin/farm.log; fi; exit $$code

FAULTS ?= 10m

faults: ## make random system calls of a server under load fail, for FAULTS=10m (needs strace)
	@mkdir -p bin
	@CLOISTER_REQUIRE=strace $(GO) test -count=1 -timeout 0 -v ./tests/faults -args -faults=$(FAULTS) > bin/faults.log 2>&1; code=$$?; \
	if [ $$code = 0 ]; then sed -n 's/^ *faults_linux_test.go:[0-9]*: \([a-z]* *[0-9]* .*\)/\1/p' bin/faults.log | grep -v '^start'; else cat bin/faults.log; fi; exit $$code

SELF ?= all
self-build: ## build and test Cloister on Cloister, as two users, and compare the programs (40 minutes; SELF=part: 17, beside other tests)
	@mkdir -p bin
	$(GOTESTSUM) --packages ./tests/bazel -- -count=1 -timeout 120m -run '^TestCloisterBuildsItself$$' -args -self=$(SELF)
	@.ci/ended bin/events-$@.json

vm: ## test limits under control groups version 2 on emulated Linux 6.12 and 6.1 (3 minutes)
	@.ci/tools vm
	@mkdir -p bin
	@CLOISTER_REQUIRE=vm $(GO) test -count=1 -timeout 45m -v ./tests/vm > bin/vm.log 2>&1; code=$$?; \
	if [ $$code = 0 ]; then grep -E '^ {0,8}--- |: Linux ' bin/vm.log; else cat bin/vm.log; fi; exit $$code

kernel: ## download the kernel for virtual machines in tests (once)
	@.ci/tools vm
	CLOISTER_REQUIRE=vm $(GO) test -count=1 ./tests/vm -run '^TestKernel$$'

qemu: kernel ## test virtual machines on an emulated processor (10 minutes)
	@mkdir -p bin
	CLOISTER_REQUIRE=qemu $(GOTESTSUM) --packages ./sandbox/microvm -- -count=1 -timeout 30m -skip '^TestBackendWithMSB$$'
	@.ci/ended bin/events-$@.json
	CLOISTER_REQUIRE=qemu $(GO) test -count=1 -timeout 30m ./tests/cli -run '^(TestScripts|TestSandboxes)$$/^(tier_qemu|qemu-tcg)$$'
	CLOISTER_REQUIRE=qemu $(GO) test -count=1 -timeout 30m ./sandbox/environment -run '^TestEnvironment$$/^qemu$$'
	CLOISTER_REQUIRE=qemu $(GO) test -count=1 -timeout 30m ./tests/bazel -run '^TestExampleBuildsUnderOtherKernels$$/^qemu-tcg$$'

example: gvisor ## build and test the whole example in gVisor (2 minutes)
	CLOISTER_REQUIRE=gvisor $(GO) test -count=1 -timeout 30m ./tests/bazel -run '^TestExampleBuildsUnderOtherKernels$$/^gvisor$$' -args -all

msb: kernel ## test the backend contract with a fake msb that boots QEMU, and with msb if it and KVM are available (10 minutes)
	@mkdir -p bin
	CLOISTER_REQUIRE=qemu $(GOTESTSUM) --packages ./sandbox/microvm -- -count=1 -timeout 30m -run '^TestBackendWith(Real)?MSB$$'
	@.ci/ended bin/events-$@.json

rules: ## check the 132 rules of the API and print the results (ENDPOINT=HOST:PORT: another server)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 30m ./tests/reapi -run '^TestRules$$' -endpoint '$(ENDPOINT)' -report $(CURDIR)/bin/rules.txt > bin/rules.log; code=$$?; \
	cat bin/rules.txt || cat bin/rules.log; exit $$code

FUZZ ?= 60s
FUZZ_REST ?= 6s

fuzz: ## run the fuzz targets, those of messages for FUZZ=60s, others for FUZZ_REST=6s
	@.ci/fuzz $(FUZZ) $(FUZZ_REST)

lint: ## run golangci-lint (staticcheck included) and govulncheck, check the public API and Bazel's build files, and vet for every operating system
	$(GO) run ./tests/internal/publicapi
	$(TOOL) golangci-lint run --allow-parallel-runners
	$(TOOL) gazelle update -external=static -mode=diff
	@if [ -n "$${GOVULNDB-}" ]; then $(TOOL) govulncheck -db "$$GOVULNDB" ./...; \
	else echo "govulncheck: skipped, set GOVULNDB to the URL of a vulnerability database (file:// works)"; fi
	@$(MAKE) --no-print-directory cross

cross: ## vet for Linux, macOS and Windows, and link cloister for the last two
	for os in linux darwin windows; do echo "$$os"; GOOS=$$os $(GO) vet ./... || exit 1; done
	for os in darwin windows; do GOOS=$$os $(BUILD) -o /dev/null ./cmd/cloister || exit 1; done

library: ## build and run the programs of examples/library, with the race detector (needs a C compiler)
	for os in darwin windows; do (cd examples/library && GOOS=$$os $(GO) vet ./...) || exit 1; done
	cd examples/library && CGO_ENABLED=1 $(GO) test -count=1 -race ./...

api: ## record the public API in .ci/api.txt; review the diff before you commit it
	$(GO) run ./tests/internal/publicapi -update

bench: build ## measure a server of its own, and print how it compares with this machine (2 minutes)
	$(BUILD) -o bin/cloister-bench ./cmd/cloister-bench
	bin/cloister-bench table

MINUTES ?= 60

soak: build ## load a server for MINUTES=60 with constant eviction, and fail if anything grows
	$(BUILD) -o bin/cloister-bench ./cmd/cloister-bench
	bin/cloister-bench soak --duration $(MINUTES)m

scale: build ## measure a head with simulated workers and clients of three sizes (5 minutes)
	$(BUILD) -o bin/cloister-bench ./cmd/cloister-bench
	bin/cloister-bench scale

WAITING ?= 1000000

queue: ## measure the queue alone: WAITING=1000000 actions on 64,000 slots, then a half and a quarter of both (4 minutes)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 60m -v -run '^TestQueue$$' ./cmd/cloister-bench/internal/scale -args -waiting=$(WAITING) > bin/queue.log; code=$$?; \
	if [ $$code = 0 ]; then sed -n 's/^.*queue: //p' bin/queue.log; else cat bin/queue.log; fi; exit $$code

grow: ## measure serve with large trees, outputs, logs and queues, of three sizes each (15 minutes)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 60m -v -run '^TestScale$$' ./tests/reapi -args -scale=full > bin/grow.log; code=$$?; \
	if [ $$code = 0 ]; then grep -E '^ *\|' bin/grow.log; else cat bin/grow.log; fi; exit $$code

BLOBS ?= 20000000

store: ## measure the store with BLOBS=20000000 small blobs, and with a quarter of them (12 GB of disk, 10 minutes)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 60m -v -run '^TestLargeStore$$' ./cas/disk -args -large=$(BLOBS) > bin/store.log; code=$$?; \
	if [ $$code = 0 ]; then sed -n 's/^.*large: //p' bin/store.log; else cat bin/store.log; fi; exit $$code

golden: ## rewrite the expected outputs in testdata; review the diff before you commit it
	$(GO) test -run '^TestPlan$$' ./cas/tree ./sandbox/namespace -update
	$(GO) test ./sandbox/policy ./sandbox/internal/seccomp ./worker/repro/manifest ./worker/access -update

reference: ## rewrite the command reference, man pages, codes, schemas of JSON output and the table of attacks
	$(GO) test ./cmd/cloister ./tests/escape -run 'IsCurrent$$|AreCurrent$$' -update

build-files: ## rewrite Bazel's build files of Go packages
	$(TOOL) gazelle update -external=static

package: ## make deb, rpm, container image and Helm chart in bin/dist (ARCH=amd64,arm64: for both)
	cd cmd/packaging && $(GO) run . $(if $(ARCH),-arch $(ARCH))

packaging: ## install the deb in a clean Debian and validate the chart (5 minutes, then 1)
	@.ci/tools packaging
	cd cmd/packaging && $(GO) vet ./... && $(GO) test -vet=off -count=1 -timeout 15m ./...

serve: build ## run cloister serve on 127.0.0.1:8980
	bin/cloister serve

clean: ## remove everything that the targets made
	rm -rf bin

# Programs other than Go that the tests and the demo use.
tools:
	@.ci/tools
