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
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// The rules are checked against any server:
//
//	go test ./tests/reapi -v -run TestRules -endpoint HOST:PORT [-instance NAME] [-part cas,ac] [-rules 36-56,62]
//
// Without -endpoint it is a server of this tree, of which more is demanded: it must support everything, and where
// a rule leaves room it must have chosen what docs/reapi.md says.
var (
	endpoint   = flag.String("endpoint", "", "address of a server that TestRules checks, [grpc://|grpcs://]HOST:PORT, in the place of one of its own")
	instance   = flag.String("instance", "", "instance name for -endpoint")
	parts      = flag.String("part", "", "parts of the rules to check: capabilities, cas, stream, chunk, ac, exec, service; with commas")
	numbers    = flag.String("rules", "", "rules to check, such as 36-56,62")
	reportFile = flag.String("report", os.Getenv("CLOISTER_RULES"), "file to write the lines of TestRules to, as well (default: what CLOISTER_RULES says)")
)

// A rule is one of the list.
type rule struct {
	number int
	part   string
	title  string // a few words
	needs  need
	// check reports what is not as the rule says by the methods of testing.TB. Its context ends when the time is
	// up. Skip says that the server does not support it.
	check func(*client)
}

// name is the rule's sub-test.
func (r *rule) name() string { return fmt.Sprintf("%03d_%s", r.number, r.title) }

// A need is what a server must have so that a rule says anything about it.
type need struct {
	what string // as the reader is told where it is absent; "" is nothing
	met  func(*client) bool
}

var (
	anything = need{}
	// aServer is needed by what no client may do to a server of somebody else: restart it, fill it, break it.
	aServer   = need{"a server of its own", func(c *client) bool { return c.server != nil }}
	execution = need{"exec_enabled", func(c *client) bool { return c.caps.GetExecutionCapabilities().GetExecEnabled() }}
	updates   = need{"update_enabled", func(c *client) bool {
		return c.caps.GetCacheCapabilities().GetActionCacheUpdateCapabilities().GetUpdateEnabled()
	}}
	trees = need{"GetTree", func(c *client) bool {
		_, err := c.getTree(&repb.GetTreeRequest{InstanceName: c.instance, RootDigest: unseen(100)})
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

// rules returns all of them in the order of their numbers.
func rules() []rule {
	all := slices.Concat(capabilityRules, storageRules, streamRules, chunkRules, actionCacheRules, executionRules)
	slices.SortStableFunc(all, func(a, b rule) int { return a.number - b.number })
	return all
}

// TestRules checks the rules, and prints a line for each.
func TestRules(t *testing.T) {
	wanted, err := selected(*parts, *numbers)
	if err != nil {
		t.Fatal(err)
	}
	var c *client
	if *endpoint == "" {
		cfg := bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Binary: built.Path(t), Jobs: 8} // most of what is executed sleeps
		// Whatever was sent, every blob is what its name says.
		t.Cleanup(func() {
			if _, err := bazelrun.Verify(context.Background(), cfg); err != nil {
				t.Error(err)
			}
		})
		c = connect(t, cfg)
		c.ours = true
	} else {
		c = dial(t, *endpoint)
		c.instance = *instance
	}
	if err := c.know(t.Context()); err != nil {
		t.Fatalf("GetCapabilities: %v", err)
	}
	results := make([]*result, len(wanted))
	t.Cleanup(func() { report(t, results) })
	for i, r := range wanted {
		t.Run(r.name(), func(t *testing.T) {
			t.Parallel() // most of a check is waiting
			results[i] = c.judge(t, r)
			if results[i].outcome == fail {
				t.Error(results[i].reason)
			}
		})
	}
}

// selected returns the rules of the parts and numbers that the flags name, all if they name none.
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
				return nil, fmt.Errorf("-part %q: there is no such part", part)
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
		return nil, fmt.Errorf("-rules %q: there is no such rule", numbers)
	}
	return all, nil
}

// dial connects to a server by its address, with options beside those of every client.
func dial(t testing.TB, address string, options ...grpc.DialOption) *client {
	t.Helper()
	secure := insecure.NewCredentials()
	address, isTLS := strings.CutPrefix(strings.TrimPrefix(address, "grpc://"), "grpcs://")
	if isTLS {
		secure = credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12})
	}
	conn, err := grpc.NewClient(address, append(options, grpc.WithTransportCredentials(secure))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return over(t, conn)
}

// know asks for the capabilities. A server that refuses to say has none, which is rule 1's to judge.
func (c *client) know(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
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

// own starts a server for one check alone, on an empty store unless cfg says otherwise.
func (c *client) own(cfg bazelrun.ServerConfig) *client {
	c.Helper()
	if c.server == nil {
		c.Skip("a server of its own")
	}
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(c.TempDir(), "store")
	}
	d := connect(c.TB, cfg)
	d.ours = true
	if err := d.know(c.Context()); err != nil {
		c.Fatal(err)
	}
	return d
}

// An outcome is what a check comes to.
type outcome string

const (
	pass        outcome = "pass"
	fail        outcome = "fail"
	unsupported outcome = "not supported"
)

// A result is what is said of one rule.
type result struct {
	rule
	outcome outcome
	reason  string   // of all but pass
	notes   []string // what else the check had to say
}

// maxFailures is how many failures of one check are told.
const maxFailures = 12

// panicked begins what is said of a check that is broken itself.
const panicked = "the check panicked"

// checkTime is how long a check may take, with all its calls.
const checkTime = 4 * time.Minute

// judge runs the check of a rule to its end, whatever it does, as a part of t, whose verdict it leaves alone.
func (c *client) judge(t testing.TB, r rule) *result {
	got := &result{rule: r, outcome: pass}
	ctx, cancel := context.WithTimeout(t.Context(), checkTime)
	defer cancel()
	v := &verdict{TB: t, ctx: ctx}
	switch {
	case r.check == nil:
		v.Error("there is no check")
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

// A verdict is the testing.TB of a check. It keeps what the check reports, so that a check that is expected to fail
// can be tested, and is otherwise the sub-test's.
type verdict struct {
	testing.TB
	ctx context.Context // the check's

	mu       sync.Mutex
	failures []string // guarded by mu
	notes    []string // guarded by mu
	lacks    string   // guarded by mu; what the server does not support
	cleanups []func() // guarded by mu
}

// run calls f on a goroutine of its own, which FailNow and SkipNow end. A panic is a failure.
func (v *verdict) run(f func()) {
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

// cleanUp runs what Cleanup was given, last first.
func (v *verdict) cleanUp() {
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

func (v *verdict) Context() context.Context { return v.ctx }
func (v *verdict) Helper()                  {}

func (v *verdict) Cleanup(f func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cleanups = append(v.cleanups, f)
}

func (v *verdict) Error(args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.failures = append(v.failures, strings.TrimSuffix(fmt.Sprintln(args...), "\n"))
}
func (v *verdict) Errorf(format string, args ...any) { v.Error(fmt.Sprintf(format, args...)) }
func (v *verdict) Fail()                             { v.Error("failed") }
func (v *verdict) FailNow() {
	if !v.Failed() {
		v.Fail()
	}
	runtime.Goexit()
}
func (v *verdict) Fatal(args ...any)                 { v.Error(args...); runtime.Goexit() }
func (v *verdict) Fatalf(format string, args ...any) { v.Errorf(format, args...); runtime.Goexit() }

func (v *verdict) Failed() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.failures) > 0
}

func (v *verdict) Log(args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.notes = append(v.notes, strings.TrimSuffix(fmt.Sprintln(args...), "\n"))
}
func (v *verdict) Logf(format string, args ...any) { v.Log(fmt.Sprintf(format, args...)) }

// Skip says what the check needs and the server does not have, as in "needs ...".
func (v *verdict) Skip(args ...any) {
	v.mu.Lock()
	v.lacks = cmp.Or(v.lacks, strings.TrimSuffix(fmt.Sprintln(args...), "\n"), "what the rule needs")
	v.mu.Unlock()
	runtime.Goexit()
}
func (v *verdict) Skipf(format string, args ...any) { v.Skip(fmt.Sprintf(format, args...)) }
func (v *verdict) SkipNow()                         { v.Skip() }
func (v *verdict) Skipped() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.lacks != ""
}

// report prints a line for each rule that was checked, and how many are which.
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
		if err := os.WriteFile(*reportFile, []byte(text.String()), 0o644); err != nil {
			t.Error(err)
		}
	}
}
