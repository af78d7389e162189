# SPDX-License-Identifier: Apache-2.0
#
# Nothing is possible only by make: go build ./... and go test ./... do the same with Go alone.

GO ?= go
# The same flags for every program, so that they share what is compiled.
BUILD = CGO_ENABLED=0 $(GO) build -trimpath

# Where there is no HOME, Go has no place for its caches.
ifeq ($(strip $(HOME)),)
export HOME := $(CURDIR)/bin/home
export GOFLAGS := $(GOFLAGS) -modcacherw
endif

.DEFAULT_GOAL := help
.PHONY: help build demo repro test test-sandbox escape interop peers farm rules fuzz lint cross bench golden serve package packaging clean tools

help: ## say what each target does
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

build: ## compile bin/cloister
	$(BUILD) -o bin/cloister ./cmd/cloister

demo: build tools ## build and test the example remotely, twice; show what the sandbox refuses (3 minutes)
	$(BUILD) -o bin/demo ./tests/demo
	@bin/demo -cloister bin/cloister

repro: build tools ## build the example remotely, and judge whether each of its actions is reproducible (5 minutes)
	$(BUILD) -o bin/demo ./tests/demo
	@bin/demo -cloister bin/cloister -repro bin/repro.md

PACKAGES ?= ./...

test: tools ## run all tests; says what it skips and why
	$(GO) vet ./...
	$(GO) test -vet=off -timeout 20m $(PACKAGES)

test-sandbox: ## run the tests of the sandbox; fails where this machine cannot confine
	CLOISTER_REQUIRE=namespaces $(GO) test -count=1 ./sandbox/...

SOAK ?= 400
ATTACKS ?= ^(TestEscapes|TestSoak)$$

escape: ## try to get out of the sandbox; print the table of guarantees (SOAK=10000: mixed with so many runs; ATTACKS=.: all)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 30m -v -run '$(ATTACKS)' ./tests/escape -args -soak=$(SOAK) > bin/escape.log; code=$$?; \
	if [ $$code = 0 ]; then grep -E '^ +(held|skipped|FAILED) |guarantees of|after as before|runs,' bin/escape.log; else cat bin/escape.log; fi; exit $$code

interop: ## run with the real bazel-remote and Buildbarn; builds them first (5 minutes, once)
	cd tests/interop && $(GO) test -count=1 -timeout 60m ./...

peers: ## only build what make interop runs with
	cd tests/interop && $(GO) test -vet=off -count=1 -timeout 60m -run '^TestProgramsCompile$$' .

CUT ?= 90s

farm: tools ## build with a head and three workers; one is killed, one drained, one cut off for CUT=90s (3 minutes)
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 20m -v -run '^TestBuildSurvivesTheLossOfWorkers$$' ./tests/farm -args -cut=$(CUT) > bin/farm.log; code=$$?; \
	if [ $$code = 0 ]; then sed -n 's/^ *build_linux_test.go:[0-9]*: //p' bin/farm.log; else cat bin/farm.log; fi; exit $$code

rules: ## check the 132 rules of the API, and print a line for each; ENDPOINT=HOST:PORT checks another server
	@mkdir -p bin
	@$(GO) test -count=1 -timeout 20m ./tests/reapi -run '^TestRules$$' -endpoint '$(ENDPOINT)' -report $(CURDIR)/bin/rules.txt > bin/rules.log; code=$$?; \
	cat bin/rules.txt || cat bin/rules.log; exit $$code

FUZZ ?= 60s

fuzz: ## look for inputs that break what reads them (8 minutes; FUZZ=10m: for so long each)
	@.ci/fuzz $(FUZZ)

lint: ## vet, format, and staticcheck if it is installed
	$(GO) vet ./...
	@unformatted=$$(gofmt -l $$($(GO) list -f '{{.Dir}}' ./...)); \
	if [ -n "$$unformatted" ]; then echo "not formatted; fix: gofmt -w"; echo "$$unformatted"; exit 1; fi
	@if command -v staticcheck > /dev/null; then staticcheck -checks inherit,-SA1019 ./...; else echo "staticcheck is not installed: skipped"; fi

cross: ## vet for every operating system
	for os in linux darwin windows; do echo "$$os"; GOOS=$$os $(GO) vet ./... || exit 1; done

bench: build ## measure a server of its own, and print how it compares with this machine (2 minutes)
	bin/cloister bench table

golden: ## write the expected outputs in testdata anew; read the difference before you commit it
	$(GO) test -run '^TestPlan$$' ./cas/tree ./sandbox/namespace -update

package: ## make deb, rpm, container image and Helm chart in bin/dist; ARCH=amd64,arm64 makes them for both
	cd cmd/packaging && CGO_ENABLED=0 $(GO) run . $(if $(ARCH),-arch $(ARCH))

packaging: ## install the deb in a clean Debian, hold the chart against the schemas of Kubernetes (5 minutes, once; then 1)
	@.ci/tools packaging
	cd cmd/packaging && $(GO) vet ./... && $(GO) test -vet=off -count=1 -timeout 15m ./...

serve: build ## run cloister serve on 127.0.0.1:8980
	bin/cloister serve

clean: ## remove what the targets above made
	rm -rf bin

# What the tests and the demo use beyond Go.
tools:
	@.ci/tools
