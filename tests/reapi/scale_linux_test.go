// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
)

var scale = flag.String("scale", "small",
	"sizes of TestScale: small, or full for three sizes each, up to those that are promised")

// A scaleTest is a test with a large input and a limit for the memory of the server.
type scaleTest struct {
	name  string
	small int
	full  [3]int
	jobs  func(n int) int // slots of the server
	run   func(c *client, n int)
	// The server may use base bytes of memory, and each more for each of n.
	base, each int64
}

func slots(k int) func(int) int { return func(int) int { return k } }

var scaleTests = []scaleTest{
	{
		"queued actions, each with a stream to a client", 2_000,
		[3]int{10_000, 30_000, 100_000},
		slots(1), queued,
		100 << 20, 30 << 10,
	},
	// With its directories, the largest tree reaches the maximum number of entries.
	{"files of an input tree", 4_000, [3]int{50_000, 200_000, 999_000}, slots(2), manyInputs, 100 << 20, 5 << 9},
	{"files of an output directory", 2_000, [3]int{12_500, 50_000, 200_000}, slots(2), manyOutputs, 100 << 20, 3 << 10},
	{"bytes of stdout", 40 << 20, [3]int{64 << 20, 256 << 20, 1 << 30}, slots(2), muchStdout, 300 << 20, 0},
	{
		"slots, each with a running action", 8,
		[3]int{16, 32, 64},
		func(n int) int { return n }, manySlots, 100 << 20,
		2 << 20,
	},
}

// TestScale checks large inputs in bounded memory. docs/performance.md has the table that it prints.
func TestScale(t *testing.T) {
	t.Parallel()
	confined(t)
	var table strings.Builder
	for _, g := range scaleTests {
		sizes := []int{g.small}
		if *scale == "full" {
			sizes = g.full[:]
		}
		for _, n := range sizes {
			t.Run(fmt.Sprintf("%s/%d", g.name, n), func(t *testing.T) {
				c := serveAs(t, bazelrun.ServerConfig{
					Dir: filepath.Join(t.TempDir(), "store"), Jobs: g.jobs(n), Args: []string{
						"--drain-timeout", "1s", "--caller-limit", "calls=0,executions=0", "--instance-limit", "calls=0,executions=0",
					},
				})
				idle := peak(t, c.server.PID)
				began := time.Now()
				g.run(c, n)
				took, most := time.Since(began), peak(t, c.server.PID)
				if limit := g.base + g.each*int64(n); most > limit {
					t.Errorf("the server took %d MiB, want at most %d", most>>20, limit>>20)
				}
				fmt.Fprintf(&table, "| %s | %d | %.1f s | %d MiB, idle %d |\n", g.name, n, took.Seconds(), most>>20, idle>>20)
			})
		}
	}
	t.Logf("\n| what | how many | time, including the client | peak memory of the server |\n|---|---|---|---|\n%s", &table)
}

// peak returns the peak memory of a process in bytes.
func peak(t testing.TB, pid int) int64 {
	t.Helper()
	status := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)))(t)
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kib, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	n := must.Get(strconv.ParseInt(kib, 10, 64))(t)
	return n << 10
}

// putAll uploads blobs in batches.
func (c *client) putAll(blobs [][]byte) []*repb.Digest {
	c.Helper()
	var ds []*repb.Digest
	for start, size := 0, 0; len(ds) < len(blobs); {
		b := blobs[len(ds)]
		ds = append(ds, cas.SHA256.Sum(b).Proto())
		if size += len(b) + 100; size > 1<<20 || len(ds) == len(blobs) {
			must.Succeed(c, errors.Join(c.batch(blobs[start:len(ds)])...))
			start, size = len(ds), 0
		}
	}
	return ds
}

// encode returns the messages as blobs.
func encode[M proto.Message](c *client, messages []M) (blobs [][]byte) {
	c.Helper()
	for _, m := range messages {
		b, _ := encoded(c, m)
		blobs = append(blobs, b)
	}
	return blobs
}

// actions uploads n distinct actions that run a script and returns their digests.
func (c *client) actions(n int, script string) []*repb.Digest {
	c.Helper()
	command := c.putProto(&repb.Command{Arguments: []string{"/bin/sh", "-c", script}})
	root := c.tree(nil)
	all := make([]*repb.Action, n)
	for i := range all {
		all[i] = &repb.Action{CommandDigest: command, InputRootDigest: root, Salt: fmt.Append(nil, i)}
	}
	return c.putAll(encode(c, all))
}

// queued queues n actions behind a running one, with up to 100 streams per connection; the last one overtakes the
// others.
func queued(c *client, n int) {
	const streams = 100
	last := c.actions(1, "echo overtook")[0]
	todo := c.actions(n-2, "true")
	blocking := c.block()

	ctx, leave := context.WithCancel(c.Context())
	defer leave()
	var clients sync.WaitGroup
	turn := make(chan struct{}, 16) // limits concurrent connections
	for part := range slices.Chunk(todo, streams) {
		conn := grpctest.Dial(c, "passthrough:///"+c.server.Addr)
		turn <- struct{}{}
		clients.Go(func() {
			defer func() { <-turn }()
			for _, d := range part {
				s, err := repb.NewExecutionClient(conn).Execute(ctx, &repb.ExecuteRequest{ActionDigest: d})
				if err != nil {
					c.Error(err)
					return
				}
				if !awaitStage(s, repb.ExecutionStage_QUEUED) {
					c.Error("the action is not queued")
					return
				}
			}
		})
	}
	clients.Wait()
	s, err := c.exec.Execute(ctx, &repb.ExecuteRequest{ActionDigest: last, ExecutionPolicy: &repb.ExecutionPolicy{Priority: -1}})
	must.Be(c, err == nil && awaitStage(s, repb.ExecutionStage_QUEUED), "the overtaking action is not queued: %v", err)
	blocking.end()
	if got, _ := c.wantSuccess("the overtaking action", answered(s, nil)); got != "overtook\n" {
		c.Errorf("the overtaking action: got output %q", got)
	}
}

// manyInputs runs an action with n input files, and another one with one file changed.
func manyInputs(c *client, n int) {
	const width = 1000
	text := func(i int) []byte { return fmt.Appendf(nil, "this is file %d", i) }
	var blobs [][]byte
	for i := range n {
		blobs = append(blobs, text(i))
	}
	var dirs []*repb.Directory
	for part := range slices.Chunk(c.putAll(blobs), width) {
		dir := &repb.Directory{}
		for i, d := range part {
			dir.Files = append(dir.Files, &repb.FileNode{Name: fmt.Sprintf("f%03d", i), Digest: d})
		}
		dirs = append(dirs, dir)
	}
	for round := range 2 {
		if round == 1 {
			dirs[1].Files[0].Digest = c.put([]byte("changed"))
		}
		root := &repb.Directory{}
		for i, d := range c.putAll(encode(c, dirs)) {
			root.Directories = append(root.Directories, &repb.DirectoryNode{Name: fmt.Sprintf("d%04d", i), Digest: d})
		}
		script := fmt.Sprintf("cat d%04d/f007; echo; ls d* | grep -c ^f", len(dirs)-1)
		want := fmt.Sprintf("%s\n%d\n", text(n-width+7), n)
		if got, _ := c.succeed(job{script: script, root: c.putProto(root)}); got != want {
			c.Errorf("got output %q, want %q", got, want)
		}
	}
}

// manyOutputs runs an action that creates a directory of n files, in subdirectories of 1,000.
func manyOutputs(c *client, n int) {
	_, r := c.succeed(job{
		script: fmt.Sprintf(`mkdir o && i=0 && while [ $i -lt %d ]; do
			d=o/$((i/1000)); [ -d $d ] || mkdir $d; echo file $i > $d/f$i || exit 1; i=$((i+1))
		done`, n),
		outputs: []string{"o"},
	})
	c.wantOutputs("a directory", r, "directory o")
	tree := c.decodeTree(r.OutputDirectories[0].TreeDigest)
	files := map[string]*repb.Digest{}
	for _, d := range tree.Children {
		for _, f := range d.Files {
			files[f.Name] = f.Digest
		}
	}
	must.Be(c, len(files) == n, "the directory has %d files, want %d", len(files), n)
	last := strconv.Itoa(n - 1)
	expect.Equal(c, c.get(files["f"+last]), "file "+last+"\n", "file %s is", last)
}

// muchStdout runs an action that writes n bytes, which are truncated.
func muchStdout(c *client, n int) {
	const kept = 32 << 20
	stdout, r := c.succeed(job{script: fmt.Sprintf("head -c %d /dev/zero && echo whole >&2", n)})
	expect.Equal(c, c.output(r.GetStderrRaw(), r.GetStderrDigest()), "whole\n", "stderr")
	got := []byte(stdout)
	if len(got) < kept || !bytes.Equal(got[:kept], make([]byte, kept)) ||
		!strings.Contains(string(got[kept:]), "truncated") {
		c.Errorf("stdout: got %d bytes ending in %q, want 32 MiB and a notice", len(got), got[min(kept, len(got)):])
	}
}

// manySlots runs n actions, all of which end when all of them run.
func manySlots(c *client, n int) {
	pause := fmt.Sprintf("600.%d", binary.LittleEndian.Uint32(fresh(4)))
	results := make(chan *answer, n)
	for _, d := range c.actions(n, "trap 'exit 0' USR1; sleep "+pause+" & wait") {
		go func() { results <- c.request(d, nil) }()
	}
	must.Hold(c, "all actions run at once", func() bool { return len(sandboxtest.Running(c, "sleep\x00"+pause)) == n })
	sandboxtest.Signal(c, pause, syscall.SIGUSR1)
	for range n {
		c.wantSuccess("one of many", <-results)
	}
}
