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
)

// roles are what the test binary does as a child of itself, by the value of roleVar.
var roles = map[string]func(args []string) error{"put": putUntilKilled}

const roleVar = "CLOISTER_DISK_TEST_ROLE"

func TestMain(m *testing.M) {
	role, ok := roles[os.Getenv(roleVar)]
	if !ok {
		os.Exit(m.Run())
	}
	if err := role(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// child returns the command that runs a role in another process. It ends with the test.
func child(t *testing.T, role string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), roleVar+"="+role)
	cmd.Stderr = os.Stderr
	return cmd
}

// putUntilKilled fills the store args[0] with a budget of args[1] bytes, in many goroutines, and writes
// a line to stdout for each blob and each result that it was told is stored.
func putUntilKilled(args []string) error {
	maxBytes, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return err
	}
	c, err := disk.Open(disk.Config{Dir: args[0], MaxBytes: maxBytes})
	if err != nil {
		return err
	}
	in, err := c.Instance("")
	if err != nil {
		return err
	}
	const writers, rounds = 8, 2000 // an end, should nobody kill it
	errs := make([]error, writers)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() { errs[w] = putMany(in, fmt.Sprintf("%d-%d", os.Getpid(), w), rounds) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func putMany(in *cas.Instance, name string, rounds int) error {
	ctx := context.Background()
	for i := range rounds {
		b := bytes.Repeat([]byte(fmt.Sprintf("%s-%d ", name, i)), 1+i*37%9000)
		d, err := cas.PutBytes(ctx, in.Store, cas.SHA256, b)
		if err != nil {
			return err
		}
		if _, err := fmt.Println("blob", d); err != nil {
			return err
		}
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
	const maxBytes = 8 << 30
	dir := t.TempDir()
	acknowledged := map[string][]cas.Digest{}
	for round := range 5 {
		runAndKill(t, dir, maxBytes, 50+100*round, acknowledged)

		c := open(t, dir, maxBytes)
		s := store(t, c, "")
		if len(acknowledged["blob"]) == 0 || len(acknowledged["result"]) == 0 {
			t.Fatal("nothing was acknowledged")
		}
		missing, err := s.Missing(t.Context(), acknowledged["blob"])
		if err != nil || len(missing) > 0 {
			t.Errorf("round %d: %v, of %d acknowledged blobs are missing: %v",
				round, err, len(acknowledged["blob"]), missing)
		}
		for _, d := range acknowledged["result"] {
			if r, err := s.Lookup(t.Context(), d); err != nil || string(r.StdoutRaw) != d.Hash() {
				t.Errorf("round %d: acknowledged result of %s: %v, %v", round, d, r, err)
			}
		}
		closeStore(t, c) // reads every file, and finds tmp empty
	}
}

func TestKilledStoreIsConsistentUnderEviction(t *testing.T) {
	const maxBytes = 64 * block
	dir := t.TempDir()
	for range 3 {
		runAndKill(t, dir, maxBytes, 200, map[string][]cas.Digest{})
		closeStore(t, open(t, dir, maxBytes))
	}
}

// runAndKill lets a child put until it has acknowledged enough, and kills it. It adds all that was
// acknowledged to got.
func runAndKill(t *testing.T, dir string, maxBytes int64, enough int, got map[string][]cas.Digest) {
	t.Helper()
	cmd := child(t, "put", dir, strconv.FormatInt(maxBytes, 10))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for n := 0; lines.Scan(); n++ {
		if n == enough {
			// While it lives it holds the store, and says who it is.
			_, err := disk.Open(disk.Config{Dir: dir, MaxBytes: maxBytes})
			holder := fmt.Sprintf("process %d,", cmd.Process.Pid)
			if !errors.Is(err, disk.ErrLocked) || !strings.Contains(err.Error(), holder) {
				t.Errorf("Open of a held store: got %v, want ErrLocked by %s", err, holder)
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Error(err)
			}
		}
		kind, text, _ := strings.Cut(lines.Text(), " ")
		d, err := cas.ParseDigest(text)
		if err != nil {
			break // the line in which it was killed
		}
		got[kind] = append(got[kind], d)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != -1 && exit.ExitCode() != 1 {
		t.Fatalf("the child was not killed: %v", err)
	}
}
