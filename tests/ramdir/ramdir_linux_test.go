// SPDX-License-Identifier: Apache-2.0

package ramdir

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestMain makes this program, called with the environment variable child, a process that holds a directory in its
// value.
func TestMain(m *testing.M) {
	parent := os.Getenv("child")
	if parent == "" {
		os.Exit(m.Run())
	}
	dir, held, err := create(parent)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(dir)
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test closes it
	held.Close()
}

// child starts a process that holds a directory in parent.
func child(t *testing.T, parent string) (dir string, kill func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env, cmd.Stderr = append(os.Environ(), "child="+parent), os.Stderr
	must.Get(cmd.StdinPipe())(t)
	out := must.Get(cmd.StdoutPipe())(t)
	must.Succeed(t, cmd.Start())
	kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Cleanup(kill)
	line := must.Get(bufio.NewReader(out).ReadString('\n'))(t)
	return strings.TrimSpace(line), kill
}

// TestDirectoriesOfKilledProcessesAreRemoved: a new process removes what a killed one left, nothing that a living one
// holds, and nothing that has another name.
func TestDirectoriesOfKilledProcessesAreRemoved(t *testing.T) {
	parent := t.TempDir()
	killed, kill := child(t, parent)
	living, _ := child(t, parent)
	other := filepath.Join(parent, "cloister-other")
	for _, dir := range []string{killed, living, other} {
		must.Succeed(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	}
	kill()
	dir, held, err := create(parent)
	must.Succeed(t, err)
	defer held.Close()
	left := must.Get(filepath.Glob(filepath.Join(parent, "*")))(t)
	expect.Equal(t, len(left), 3, "directories")
	for _, dir := range []string{living, other, dir} {
		_, err := os.Stat(dir)
		expect.Equal(t, err, nil, dir)
	}
}
