// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/must"
)

// TestRootOutlivesEviction: a run reads the right bytes of its root file system although the store evicts everything
// meanwhile. A later run in the same image does, too; if blobs are missing, it fails with UNAVAILABLE, and a retry
// pulls them.
func TestRootOutlivesEviction(t *testing.T) {
	rootWorkers(t, func(t *testing.T, c *confining) {
		files := map[string]string{"data/large": strings.Repeat("a large file of the root\n", 20_000)}
		want := files["data/large"]
		for i := range 50 {
			text := fmt.Sprintf("small file %d\n", i)
			files[fmt.Sprintf("data/small%02d", i)] = text
			want += text
		}
		s := c.withImages()
		s.roots[pinnedOne] = imageRoot{Root: c.rootFiles(files)}
		c.store.SetHolder(c.cfg.Stager.ReleaseRemoved)
		pulls := 0
		s.repull = func() { pulls++; c.rootFiles(files) }
		const script = "cat /data/large /data/small*"
		run := func(script string) *rootRun {
			image := platform("container-image", "docker://"+pinnedOne)
			return &rootRun{script: script, env: map[string]string{"PATH": "/bin"}, platform: image}
		}

		stdin, release, err := os.Pipe()
		must.Succeed(t, err)
		defer stdin.Close()
		defer release.Close()
		stdout := &signalled{written: make(chan struct{}, 1)}
		ended := make(chan error, 1)
		action := c.actionOf(run("echo begun; read line; " + script))
		go func() {
			_, err := c.Execute(t.Context(), &Task{Action: action, Stdin: stdin, Stdout: stdout}, nil)
			ended <- err
		}()
		select {
		case <-stdout.written:
		case err := <-ended:
			t.Fatalf("the action ended with %v before its input", err)
		}
		c.evict()
		must.Get(io.WriteString(release, "\n"))(t)
		must.Succeed(t, <-ended)
		if got := stdout.text.String(); got != "begun\n"+want {
			t.Errorf("a run during the eviction read %d bytes, %.60q..., want %d", len(got), got, len(want))
		}
		later, lost := run(script), 0
		if err := c.try(later, Task{}); err != nil { // the image was unmounted with its last user
			wantFault(t, "a run whose root file system is gone", err, FaultUnavailable)
			later, lost = c.run(*run(script), Task{}, want), 1
		}
		if later.stdout != want || pulls != lost {
			t.Errorf("a run after the eviction read %d bytes and made %d pulls, want %d and %d",
				len(later.stdout), pulls, len(want), lost)
		}
	}, func(config *disk.Config) { config.Lease = -1 })
}

// A signalled buffer sends on written after a write.
type signalled struct {
	text    bytes.Buffer
	written chan struct{}
}

func (s *signalled) Write(b []byte) (int, error) {
	defer func() {
		select {
		case s.written <- struct{}{}:
		default: // already known
		}
	}()
	return s.text.Write(b)
}

// evict removes everything from the store that nothing keeps in use, as puts do that need the room.
func (c *confining) evict() {
	c.t.Helper()
	if _, err := c.store.Collect(c.t.Context(), disk.CollectOptions{MaxBytes: 1}); err != nil {
		c.t.Fatal(err)
	}
}
