// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/must"
)

// TestGrowingToBuildbarn checks the worker's configuration of docs/growing.md, step 4, with Buildbarn's scheduler and
// clients' flags of step 2. Only addresses and the directory differ.
func TestGrowingToBuildbarn(t *testing.T) {
	text := must.Get(os.ReadFile("../../docs/growing.md"))(t)
	config := regexp.MustCompile(`(?s)\n(version: 1\nscheduler: grpc://scheduler:8983\n.*?)EOT\n`).FindSubmatch(text)
	clientFlag := func(flag string) string {
		m := regexp.MustCompile(`(?m)^build --` + flag + `=(\S+)$`).FindSubmatch(text)
		must.Be(t, m != nil, "docs/growing.md has no client flag --%s", flag)
		return string(m[1])
	}
	must.Be(t, config != nil, "docs/growing.md has no configuration of a worker of a scheduler")
	b := farm(t)
	metrics := must.Get(loopback.Address())(t)
	here := strings.NewReplacer("scheduler:8983", b.scheduler.Addr, "storage:8980", b.store.Addr, "127.0.0.1:8982", metrics)
	file := filepath.Join(t.TempDir(), "config.yaml")
	must.Succeed(t, os.WriteFile(file, []byte(here.Replace(string(config[1]))), 0o600))
	join := confining(t, "join", "--dir", t.TempDir(), "--max-size", "1GiB", "--config", file)
	// The scheduler refuses actions until its first worker has joined.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		out, err := exec.CommandContext(t.Context(), filepath.Join(filepath.Dir(join.cmd.Path), "cloister-bench"), "noop", "--actions", "10", "--rounds", "1", "--local-time", "20ms",
			"--executor", "grpc://"+b.scheduler.Addr, "--cas", "grpc://"+b.store.Addr,
			"--instance", clientFlag("remote_instance_name"), "--platform", clientFlag("remote_default_exec_properties")).CombinedOutput()
		if err == nil {
			break
		}
		must.Be(t, !time.Now().After(deadline), "cloister-bench noop: %v\n%s", err, out)
	}
}
