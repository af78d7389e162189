# SPDX-License-Identifier: Apache-2.0
#
# make only shortens commands: go build ./... and go test ./... work with Go alone.

GO ?= go
# The same flags for every program, so that they share the build cache.
BUILD = CGO_ENABLED=0 $(GO) build -trimpath
# Development tools, pinned in a module of their own.
TOOL = $(GO) tool -modfile=.ci/go.mod

# Without HOME, Go has no place for its caches.
ifeq ($(strip $(HOME)),)
export HOME := $(CURDIR)/bin/home
export GOFLAGS := $(GOFLAGS) -modcacherw
endif

.DEFAULT_GOAL := help
.PHONY: help build demo recording repro test test-sandbox escape interop peers farm rules fuzz lint race cross bench golden \
	serve package packaging reference clean tools

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

build: ## compile bin/cloister
	$(BUILD) -o bin/cloister ./cmd/cloister

demo: build tools ## build and test the example remotely, twice, and attack the sandbox (3 minutes)
	$(BUILD) -o bin/demo ./tests/demo
	@bin/demo -cloister bin/cloister

recording: build tools ## run the demo and record it in docs/demo.svg
	$(BUILD) -o bin/demo ./tests/demo
	@bin/demo -cloister bin/cloister -svg docs/demo.svg

repro: build tools ## build the example remotely and check that each action is reproducible (5 minutes)
	$(BUILD) -o bin/demo ./tests/demo
	@bin/demo -cloister bin/cloister -repro bin/repro.md

PACKAGES ?= ./...

test: tools ## run all tests and list the skipped ones with their reasons
	$(GO) vet ./...
	$(TOOL) gotestsum --format pkgname --format-hide-empty-pkg -- -vet=off -timeout 20m $(PACKAGES)

# These tests measure allocations, which the race detector increases.
NORACE = ^(TestHostileProgramsTakeLimitedMemory)$$

race: ## run the unit tests with the race detector (needs a C compiler)
	CGO_ENABLED=1 $(GO) test -race -short -vet=off -timeout 20m -skip '$(NORACE)' \
		$$($(GO) list ./cas/... ./sandbox/... ./worker/... ./cmd/...)

test-sandbox: ## run the sandbox tests; fail where this machine cannot confine
	CLOISTER_REQUIRE=namespaces $(GO) test -count=1 ./sandbox/...

SOAK ?= 400
ATTACKS ?= ^(TestEscapes|TestSoak)$$

escape: ## run hostile programs and print the guarantees (SOAK=10000: among as many other runs; ATTACKS=.: all)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 30m -v -run '$(ATTACKS)' ./tests/escape -args -soak=$(SOAK) > bin/escape.log; code=$$?; \
	if [ $$code = 0 ]; then grep -E '^ +(held|skipped|FAILED) |guarantees of|after as before|runs,' bin/escape.log; else cat bin/escape.log; fi; exit $$code

interop: ## test against the real bazel-remote and Buildbarn (builds them once: 5 minutes)
	cd tests/interop && $(GO) test -count=1 -timeout 60m ./...

peers: ## build the programs that make interop uses
	cd tests/interop && $(GO) test -vet=off -count=1 -timeout 60m -run '^TestProgramsCompile$$' .

CUT ?= 90s

farm: tools ## build with three workers; kill one, drain one, cut one off for CUT=90s (3 minutes)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 20m -v -run '^TestBuildSurvivesTheLossOfWorkers$$' ./tests/farm -args -cut=$(CUT) > bin/farm.log; code=$$?; \
	if [ $$code = 0 ]; then sed -n 's/^ *build_linux_test.go:[0-9]*: //p' bin/farm.log; else cat bin/farm.log; fi; exit $$code

rules: ## check the 132 rules of the API and print the results (ENDPOINT=HOST:PORT: another server)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 20m ./tests/reapi -run '^TestRules$$' -endpoint '$(ENDPOINT)' -report $(CURDIR)/bin/rules.txt > bin/rules.log; code=$$?; \
	cat bin/rules.txt || cat bin/rules.log; exit $$code

FUZZ ?= 60s

fuzz: ## run the fuzz targets (8 minutes; FUZZ=10m: that long each)
	@.ci/fuzz $(FUZZ)

lint: ## run golangci-lint (staticcheck included) and govulncheck, and vet for every operating system
	$(TOOL) golangci-lint run
	@if [ -n "$${GOVULNDB-}" ]; then $(TOOL) govulncheck -db "$$GOVULNDB" ./...; \
	else echo "govulncheck: skipped, set GOVULNDB to the URL of a vulnerability database (file:// works)"; fi
	@$(MAKE) --no-print-directory cross

cross: ## vet for Linux, macOS and Windows
	for os in linux darwin windows; do echo "$$os"; GOOS=$$os $(GO) vet ./... || exit 1; done

bench: build ## measure a server of its own, and print how it compares with this machine (2 minutes)
	$(BUILD) -o bin/cloister-bench ./cmd/cloister-bench
	bin/cloister-bench table

golden: ## rewrite the expected outputs in testdata; review the diff before you commit it
	$(GO) test -run '^TestPlan$$' ./cas/tree ./sandbox/namespace -update
	$(GO) test ./sandbox/policy ./sandbox/internal/seccomp ./worker/repro/manifest ./cmd/cloister/internal/access -update

reference: ## rewrite the command reference and man pages in docs/reference
	$(GO) test ./cmd/cloister -run '^TestReferenceIsCurrent$$' -update

package: ## make deb, rpm, container image and Helm chart in bin/dist (ARCH=amd64,arm64: for both)
	cd cmd/packaging && CGO_ENABLED=0 $(GO) run . $(if $(ARCH),-arch $(ARCH))

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
