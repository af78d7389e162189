// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// killVar holds the directory and the budget of the store for TestKillChild, and whether it has leases.
const killVar = "CLOISTER_DISK_TEST_KILL"

func killConfig(dir string, maxBytes int64, leased bool) disk.Config {
	config := disk.Config{Dir: dir, MaxBytes: maxBytes, Pack: 8 << 10, Lease: none}
	if leased {
		config.Lease = disk.DefaultLease
	}
	return config
}

// TestKillChild puts from many goroutines, and prints a line for each acknowledged blob and result.
func TestKillChild(t *testing.T) {
	what := strings.Split(os.Getenv(killVar), "|")
	if len(what) != 3 {
		t.Skip("child of another test")
	}
	maxBytes := must.Get(strconv.ParseInt(what[1], 10, 64))(t)
	c := must.Get(disk.Open(killConfig(what[0], maxBytes, what[2] == "true")))(t)
	in := must.Get(c.Instance(""))(t)
	const writers, rounds = 8, 2000 // an end in case nobody kills it
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			expect.Error(t, putMany(in, fmt.Sprintf("%d-%d", os.Getpid(), w), rounds), nil)
		})
	}
	wg.Wait()
}

func putMany(in *cas.Instance, name string, rounds int) error {
	ctx := context.Background()
	var last []byte // concatenated with the next blob, it is stored as chunks
	for i := range rounds {
		b := bytes.Repeat([]byte(fmt.Sprintf("%s-%d ", name, i)), 1+i*37%900)
		d, err := cas.PutBytes(ctx, in.Store, cas.SHA256, b)
		if err != nil {
			return err
		}
		if _, err := fmt.Println("blob", d); err != nil {
			return err
		}
		both := append(last, b...)
		whole := cas.SHA256.Sum(both)
		if m := (cas.ChunkList{Chunks: []cas.Digest{cas.SHA256.Sum(last), d}}); len(last) > 0 {
			// Without leases a chunk may have been evicted.
			if err := in.Store.(cas.Splicer).Splice(ctx, whole, m); err == nil {
				if _, err := fmt.Println("blob", whole); err != nil {
					return err
				}
			} else if !errors.Is(err, cas.ErrNotFound) {
				return err
			}
		}
		last = b
		if err := in.Actions.Record(ctx, d, &repb.ActionResult{StdoutRaw: []byte(d.Hash())}); err != nil {
			return err
		}
		if _, err := fmt.Println("result", d); err != nil {
			return err
		}
	}
	return nil
}

// Rule 56.
func TestKilledStoreKeepsWhatItAcknowledged(t *testing.T) {
	config := killConfig(t.TempDir(), 8<<30, true)
	acknowledged := map[string][]cas.Digest{}
	for round := range 4 {
		runAndKill(t, config, 50+200*round, acknowledged)

		c, s := openStore(t, config)
		must.Be(t, len(acknowledged["blob"]) != 0 && len(acknowledged["result"]) != 0, "nothing was acknowledged")
		expect.Slices(t, missing(t, s, acknowledged["blob"]...), nil,
			"round %d: of %d acknowledged blobs, missing", round, len(acknowledged["blob"]))
		for _, d := range acknowledged["result"] {
			if r, err := s.Lookup(t.Context(), d); err != nil || string(r.StdoutRaw) != d.Hash() {
				t.Errorf("round %d: acknowledged result of %s: %v, %v", round, d, r, err)
			}
		}
		closeStore(t, c) // Check reads everything
	}
}

func TestKilledStoreIsConsistentUnderEviction(t *testing.T) {
	config := killConfig(t.TempDir(), 64*block, false)
	for range 4 {
		runAndKill(t, config, 600, map[string][]cas.Digest{})
		closeStore(t, open(t, config))
	}
}

// runAndKill runs a child until it has acknowledged enough puts, and kills it. It adds what was acknowledged to got.
func runAndKill(t *testing.T, config disk.Config, enough int, got map[string][]cas.Digest) {
	t.Helper()
	self := must.Get(os.Executable())(t)
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestKillChild$", "-test.timeout=15m")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s|%d|%v", killVar, config.Dir, config.MaxBytes, config.Lease > 0))
	cmd.Stderr = os.Stderr
	out := must.Get(cmd.StdoutPipe())(t)
	must.Succeed(t, cmd.Start())
	lines := bufio.NewScanner(out)
	for n := 0; lines.Scan(); n++ {
		if n == enough {
			// While it runs, it has the store locked and is named in errors.
			_, err := disk.Open(config)
			holder := fmt.Sprintf("(pid %d)", cmd.Process.Pid)
			expect.That(t, errors.Is(err, disk.ErrLocked) && strings.Contains(err.Error(), holder),
				"Open of a locked store: got %v, want ErrLocked naming %s", err, holder)
			expect.Error(t, cmd.Process.Kill(), nil)
		}
		kind, text, _ := strings.Cut(lines.Text(), " ")
		d, err := cas.ParseDigest(text)
		if err != nil {
			break // a partial line: the child was killed
		}
		got[kind] = append(got[kind], d)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != -1 {
		t.Fatalf("the child was not killed: %v", err)
	}
}
