# make test is what CI runs. It needs Go and, for the tests on PostgreSQL, the
# server's programs; as root on Debian it installs these by itself.

GO ?= go
# A checkout that belongs to somebody else has no version control status.
export GOFLAGS := -buildvcs=false $(GOFLAGS)

# Every module of the workspace; go.work is the only list of them.
MODULES := $(shell $(GO) list -m -f '{{.Dir}}')

# The linter is built from the module proxy, outside the tree, once for each
# version of it and of Go.
LINT_VERSION := v2.15.0
LINT_DIR := $(abspath $(shell $(GO) env GOCACHE)/../gormoutbox-tools/golangci-lint-$(LINT_VERSION)-$(shell $(GO) env GOVERSION))
LINT := $(LINT_DIR)/golangci-lint

# each runs a command in every module and fails if it failed in any.
each = @status=0; for module in $(MODULES); do (cd "$$module" && $(1)) || status=1; done; exit $$status

.NOTPARALLEL:

.PHONY: help
help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

.PHONY: demo
demo: ## Run the example application; ARGS are its arguments.
	@cd examples/gin-app && $(GO) run . $(ARGS)

.PHONY: test
test: ## Check everything, and that the checks leave nothing in the tree.
	@before="$$(git status --porcelain)"; \
	$(MAKE) --no-print-directory format tidy alone vet lint race || exit 1; \
	after="$$(git status --porcelain)"; \
	if [ "$$before" != "$$after" ]; then \
		echo "The checks changed the tree. Before:"; echo "$$before"; \
		echo "After:"; echo "$$after"; exit 1; \
	fi

.PHONY: format
format: ## Check the formatting.
	@files="$$(gofmt -l .)"; [ -z "$$files" ] || { echo "Not formatted (make fmt):"; echo "$$files"; exit 1; }

.PHONY: tidy
tidy: ## Check that go.mod and go.sum of each module are tidy.
	$(call each,GOWORK=off $(GO) mod tidy -diff)

.PHONY: alone
alone: ## Build the library as its users do, without the workspace.
	GOWORK=off $(GO) build ./...

.PHONY: vet
vet: ## Run go vet.
	$(call each,$(GO) vet ./...)

.PHONY: lint
lint: $(LINT) ## Run golangci-lint.
	$(call each,$(LINT) run ./...)

.PHONY: race
race: ## Run the tests of all modules under the race detector.
	@$(GO) run ./internal/testenv -- $(MAKE) --no-print-directory race-in-env

.PHONY: race-in-env
race-in-env:
	$(call each,$(GO) test -race ./...)

.PHONY: fmt
fmt: $(LINT) ## Format the code.
	$(call each,$(LINT) fmt)

.PHONY: bench-core
bench-core: ## Run the benchmarks; ARGS are their arguments.
	@cd bench && $(GO) run . $(ARGS)

$(LINT):
	GOBIN=$(LINT_DIR) $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
