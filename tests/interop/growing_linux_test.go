// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/interop/peers"
)

// TestGrowingIntoBuildbarn: with the flags of docs/growing.md, step 4, a worker takes actions of Buildbarn's scheduler that say
// what the document has clients say since step 2. Only addresses are others here, and the directory is stated.
func TestGrowingIntoBuildbarn(t *testing.T) {
	text, err := os.ReadFile("../../docs/growing.md")
	if err != nil {
		t.Fatal(err)
	}
	flags := regexp.MustCompile(`(?m)^CLOISTER_FLAGS="(grpc://scheduler:8983 .*)"$`).FindSubmatch(text)
	says := func(flag string) string {
		m := regexp.MustCompile(`(?m)^build --` + flag + `=(\S+)$`).FindSubmatch(text)
		if m == nil {
			t.Fatalf("docs/growing.md has clients say nothing of --%s", flag)
		}
		return string(m[1])
	}
	if flags == nil {
		t.Fatal("docs/growing.md has no flags for a worker of a scheduler")
	}
	program, err := cloister()
	if err != nil {
		t.Fatal(err)
	}
	if err := bazelrun.Confines(t.Context(), program, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	b := farm(t)
	metrics, err := peers.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	line := strings.NewReplacer("scheduler:8983", b.scheduler.Addr, "storage:8980", b.store.Addr, "127.0.0.1:8982", metrics).Replace(string(flags[1]))
	var said bytes.Buffer
	join := exec.Command(program, append([]string{"join", "--dir", t.TempDir(), "--max-size", "1GiB"}, strings.Fields(line)...)...)
	join.Stdout, join.Stderr = &said, &said
	if err := join.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- join.Wait() }()
	defer func() {
		_ = join.Process.Signal(syscall.SIGTERM) // the only error is that it has ended
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("cloister join: %v\n%s", err, &said)
			}
		case <-time.After(30 * time.Second):
			_ = join.Process.Kill()
			<-ended
			t.Errorf("cloister join does not end\n%s", &said)
		}
	}()
	// Until its first worker has come, the scheduler refuses.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		out, err := exec.CommandContext(t.Context(), filepath.Join(filepath.Dir(program), "cloister-bench"), "noop", "-n", "10", "--rounds", "1", "--local-time", "20ms",
			"--executor", "grpc://"+b.scheduler.Addr, "--cas", "grpc://"+b.store.Addr,
			"--instance", says("remote_instance_name"), "--platform", says("remote_default_exec_properties")).CombinedOutput()
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("cloister-bench noop: %v\n%s", err, out)
		}
	}
}
