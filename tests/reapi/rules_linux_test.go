// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"cmp"
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// TestRules checks the rules on any server:
//
//	go test ./tests/reapi -v -run TestRules -endpoint HOST:PORT [-instance NAME] [-part cas,ac] [-rules 36-56,62]
//
// Without -endpoint it starts a server of this tree, which must support everything and make the choices in
// docs/reapi.md where a rule leaves room.
var (
	endpoint   = flag.String("endpoint", "", "address of a server that TestRules checks, [grpc://|grpcs://]HOST:PORT, in the place of one of its own")
	instance   = flag.String("instance", "", "instance name for -endpoint")
	parts      = flag.String("part", "", "parts of the rules to check: capabilities, cas, stream, chunk, ac, exec, service; with commas")
	numbers    = flag.String("rules", "", "rules to check, such as 36-56,62")
	reportFile = flag.String("report", os.Getenv("CLOISTER_RULES"), "file to write the lines of TestRules to, as well (default: what CLOISTER_RULES says)")
)

// A rule is one rule of the conformance list.
type rule struct {
	number int
	part   string
	title  string // a few words
	needs  need
	// check reports violations by the methods of testing.TB. Its context ends at the timeout. Skip reports what the
	// server does not support.
	check func(*client)
}

// name returns the name of the rule's subtest.
func (r *rule) name() string { return fmt.Sprintf("%03d_%s", r.number, r.title) }

// A need is what a server must support for a rule to apply.
type need struct {
	what string // for the report; "" means nothing
	met  func(*client) bool
}

var (
	anything = need{}
	// ownServer is the need of checks that restart, fill or break the server.
	ownServer = need{"its own server", func(c *client) bool { return c.server != nil }}
	execution = need{"exec_enabled", func(c *client) bool { return c.caps.GetExecutionCapabilities().GetExecEnabled() }}
	updates   = need{"update_enabled", func(c *client) bool {
		return c.caps.GetCacheCapabilities().GetActionCacheUpdateCapabilities().GetUpdateEnabled()
	}}
	trees = need{"GetTree", func(c *client) bool {
		_, err := c.getTree(&repb.GetTreeRequest{InstanceName: c.instance, RootDigest: absentDigest(100)})
		return c.ours || status.Code(err) != codes.Unimplemented
	}}
	zstdStreams = need{"ZSTD in supported_compressors", func(c *client) bool {
		return slices.Contains(c.caps.GetCacheCapabilities().GetSupportedCompressors(), repb.Compressor_ZSTD)
	}}
	zstdBatches = need{"ZSTD in supported_batch_update_compressors", func(c *client) bool {
		return slices.Contains(c.caps.GetCacheCapabilities().GetSupportedBatchUpdateCompressors(), repb.Compressor_ZSTD)
	}}
	splitting = need{"split_blob_support", func(c *client) bool { return c.caps.GetCacheCapabilities().GetSplitBlobSupport() }}
	splicing  = need{"splice_blob_support", func(c *client) bool { return c.caps.GetCacheCapabilities().GetSpliceBlobSupport() }}
)

// rules returns all rules by number.
func rules() []rule {
	all := slices.Concat(capabilityRules, storageRules, streamRules, chunkRules, actionCacheRules, executionRules)
	slices.SortStableFunc(all, func(a, b rule) int { return a.number - b.number })
	return all
}

// fullQueueRule is checked before the others, since the queue must be filled within the minute for which it keeps the
// operations of clients that have left.
const fullQueueRule = 86

// TestRules checks the rules and prints a line for each.
func TestRules(t *testing.T) {
	wanted := must.Get(selected(*parts, *numbers))(t)
	var c *client
	if *endpoint == "" {
		cfg := bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Binary: built.Path(t), Jobs: 8} // most actions sleep
		// Whatever was sent, every stored blob must match its digest.
		t.Cleanup(func() { must.Get(bazelrun.Verify(context.Background(), cfg))(t) })
		c = connect(t, cfg)
		c.ours = true
	} else {
		c = dial(t, *endpoint)
		c.instance = *instance
	}
	if err := c.getCapabilities(t.Context()); err != nil {
		t.Fatalf("GetCapabilities: %v", err)
	}
	results := make([]*result, len(wanted))
	t.Cleanup(func() { report(t, results) })
	check := func(i int, r rule, parallel bool) {
		t.Run(r.name(), func(t *testing.T) {
			if parallel {
				t.Parallel() // checks spend most of their time waiting
			}
			results[i] = c.evaluate(t, r)
			if results[i].outcome == fail {
				t.Error(results[i].reason)
			}
		})
	}
	for i, r := range wanted {
		if r.number == fullQueueRule {
			check(i, r, false)
		}
	}
	t.Parallel() // with the other tests
	for i, r := range wanted {
		if r.number != fullQueueRule {
			check(i, r, true)
		}
	}
}

// selected returns the rules that the flags select, or all rules.
func selected(parts, numbers string) ([]rule, error) {
	all := rules()
	if parts != "" {
		var of []rule
		for part := range strings.SplitSeq(parts, ",") {
			n := len(of)
			for _, r := range all {
				if r.part == part {
					of = append(of, r)
				}
			}
			if len(of) == n {
				return nil, fmt.Errorf("-part %q: no such part", part)
			}
		}
		all = of
	}
	if numbers == "" {
		return all, nil
	}
	wanted := map[int]bool{}
	for term := range strings.SplitSeq(numbers, ",") {
		from, to, isRange := strings.Cut(term, "-")
		first, err := strconv.Atoi(from)
		last := first
		if err == nil && isRange {
			last, err = strconv.Atoi(to)
		}
		if err != nil || first < 1 || last > 999 || first > last {
			return nil, fmt.Errorf("-rules %q: write numbers and ranges such as 36-56,62", term)
		}
		for n := first; n <= last; n++ {
			wanted[n] = true
		}
	}
	all = slices.DeleteFunc(all, func(r rule) bool { return !wanted[r.number] })
	if len(all) == 0 {
		return nil, fmt.Errorf("-rules %q: no such rule", numbers)
	}
	return all, nil
}

// dial connects to a server; the options are added to the default ones.
func dial(t testing.TB, address string, options ...grpc.DialOption) *client {
	t.Helper()
	secure := insecure.NewCredentials()
	address, isTLS := strings.CutPrefix(strings.TrimPrefix(address, "grpc://"), "grpcs://")
	if isTLS {
		secure = credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12})
	}
	conn := must.Get(grpc.NewClient(address, append(options, grpc.WithTransportCredentials(secure))...))(t)
	t.Cleanup(func() { conn.Close() })
	return over(t, conn)
}

// getCapabilities gets the capabilities; they are empty if the server does not report any, which rule 1 checks.
func (c *client) getCapabilities(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	caps, err := repb.NewCapabilitiesClient(c.conn).GetCapabilities(ctx,
		&repb.GetCapabilitiesRequest{InstanceName: c.instance}, grpc.WaitForReady(true))
	if code := status.Code(err); code == codes.Unavailable || code == codes.DeadlineExceeded {
		return err
	}
	c.caps = caps
	if c.caps == nil {
		c.caps = &repb.ServerCapabilities{}
	}
	return nil
}

// own starts a server for one check, with an empty store unless cfg names one.
func (c *client) own(cfg bazelrun.ServerConfig) *client {
	c.Helper()
	if c.server == nil {
		c.Skip("its own server")
	}
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(c.TempDir(), "store")
	}
	d := connect(c.TB, cfg)
	d.ours = true
	must.Succeed(c, d.getCapabilities(c.Context()))
	return d
}

// An outcome is the outcome of a check.
type outcome string

const (
	pass        outcome = "pass"
	fail        outcome = "fail"
	unsupported outcome = "not supported"
)

// A result is the result of checking one rule.
type result struct {
	rule
	outcome outcome
	reason  string   // unless the rule passed
	notes   []string // what the check logged
}

// maxFailures limits the reported failures of one check.
const maxFailures = 12

// panicked starts the failure of a check that panicked.
const panicked = "the check panicked"

// checkTime is the timeout of a check. It is meant for checks that hang: on a slow disk, writing 5 GiB takes minutes.
const checkTime = 15 * time.Minute

// evaluate runs the check of a rule as a part of t, without failing t.
func (c *client) evaluate(t testing.TB, r rule) *result {
	got := &result{rule: r, outcome: pass}
	ctx, cancel := context.WithTimeout(t.Context(), checkTime)
	defer cancel()
	v := &recorder{TB: t, ctx: ctx}
	switch {
	case r.check == nil:
		v.Error("no check")
	case r.needs.met != nil && !r.needs.met(c.in(v)):
		v.lacks = r.needs.what
	default:
		v.run(func() { r.check(c.in(v)) })
		cancel()
		v.cleanUp()
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	got.notes = v.notes
	switch {
	case len(v.failures) > 0:
		if n := len(v.failures); n > maxFailures {
			v.failures = append(v.failures[:maxFailures], fmt.Sprintf("and %d more", n-maxFailures))
		}
		got.outcome, got.reason = fail, strings.Join(v.failures, "\n")
	case v.lacks != "":
		got.outcome, got.reason = unsupported, "needs "+v.lacks
		if c.ours {
			got.outcome = fail
		}
	}
	return got
}

// A recorder is the testing.TB of a check. It records what the check reports, so that tests of the checks can expect
// failures. Everything else is that of the subtest.
type recorder struct {
	testing.TB
	ctx context.Context // of the check

	mu       sync.Mutex
	failures []string // guarded by mu
	notes    []string // guarded by mu
	lacks    string   // guarded by mu; what the server does not support
	cleanups []func() // guarded by mu
}

// run calls f in its own goroutine, which FailNow and SkipNow end. A panic is a failure.
func (v *recorder) run(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				v.Errorf("%s: %v\n%s", panicked, p, debug.Stack())
			}
		}()
		f()
	}()
	<-done
}

// cleanUp runs the cleanups in reverse order.
func (v *recorder) cleanUp() {
	for {
		v.mu.Lock()
		n := len(v.cleanups)
		if n == 0 {
			v.mu.Unlock()
			return
		}
		f := v.cleanups[n-1]
		v.cleanups = v.cleanups[:n-1]
		v.mu.Unlock()
		v.run(f)
	}
}

func (v *recorder) Context() context.Context { return v.ctx }
func (v *recorder) Helper()                  {}

func (v *recorder) Cleanup(f func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cleanups = append(v.cleanups, f)
}

func (v *recorder) Error(args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.failures = append(v.failures, strings.TrimSuffix(fmt.Sprintln(args...), "\n"))
}
func (v *recorder) Errorf(format string, args ...any) { v.Error(fmt.Sprintf(format, args...)) }
func (v *recorder) Fail()                             { v.Error("failed") }
func (v *recorder) FailNow() {
	if !v.Failed() {
		v.Fail()
	}
	runtime.Goexit()
}
func (v *recorder) Fatal(args ...any)                 { v.Error(args...); runtime.Goexit() }
func (v *recorder) Fatalf(format string, args ...any) { v.Errorf(format, args...); runtime.Goexit() }

func (v *recorder) Failed() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.failures) > 0
}

func (v *recorder) Log(args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.notes = append(v.notes, strings.TrimSuffix(fmt.Sprintln(args...), "\n"))
}
func (v *recorder) Logf(format string, args ...any) { v.Log(fmt.Sprintf(format, args...)) }

// Skip reports what the check needs and the server does not support, to complete "needs ...".
func (v *recorder) Skip(args ...any) {
	v.mu.Lock()
	v.lacks = cmp.Or(v.lacks, strings.TrimSuffix(fmt.Sprintln(args...), "\n"), "what the rule needs")
	v.mu.Unlock()
	runtime.Goexit()
}
func (v *recorder) Skipf(format string, args ...any) { v.Skip(fmt.Sprintf(format, args...)) }
func (v *recorder) SkipNow()                         { v.Skip() }
func (v *recorder) Skipped() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.lacks != ""
}

// report prints a line for each checked rule and the totals.
func report(t testing.TB, results []*result) {
	var text strings.Builder
	count := map[outcome]int{}
	for _, r := range results {
		if r == nil {
			continue // not selected by -run
		}
		count[r.outcome]++
		fmt.Fprintf(&text, "%4d  %-13s  %-12s  %s\n", r.number, r.outcome, r.part, r.title)
		for _, line := range append(strings.Split(r.reason, "\n"), r.notes...) {
			if line != "" {
				fmt.Fprintf(&text, "      %s\n", line)
			}
		}
	}
	fmt.Fprintf(&text, "%d pass, %d fail, %d not supported\n", count[pass], count[fail], count[unsupported])
	os.Stdout.WriteString(text.String())
	if *reportFile != "" {
		must.Succeed(t, os.WriteFile(*reportFile, []byte(text.String()), 0o644))
	}
}
