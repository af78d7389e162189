// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"google.golang.org/grpc/codes"
)

// TestInputsArePrefetchedWhileQueued checks that a queued action runs although the upstream server with its inputs
// stops before.
func TestInputsArePrefetchedWhileQueued(t *testing.T) {
	upstream := serve(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	metrics := l.Addr().String()
	l.Close()
	server := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Jobs: 1, Args: []string{
		"--cas", "grpc://" + upstream.server.Addr, "--cas-write", "back", "--drain-timeout", "1s", "--metrics", metrics,
	}})
	fetched := func() int {
		resp, err := http.Get("http://" + metrics + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		var n int
		_, value, _ := strings.Cut(string(text), "\ncloister_cas_upstream_fetched_total ")
		fmt.Sscan(value, &n)
		return n
	}

	running, waiting := make(chan *repb.ExecuteResponse, 1), make(chan *repb.ExecuteResponse, 1)
	first := server.upload(action{script: "sleep 9.87"})
	go func() { running <- server.wait(first, 0) }()
	until(t, "running", func() bool { return len(sandboxtest.Running(t, "sleep 9.87")) > 0 })
	// the action, its command, three Directories and three files
	next := upstream.upload(action{script: "cat a d/b e/c | wc -c", files: map[string]file{
		"a": {text: "a"}, "d/b": {text: "bb"}, "e/c": {text: large},
	}})
	before := fetched()
	go func() { waiting <- server.wait(next, 0) }()
	until(t, "prefetched", func() bool { return fetched() == before+8 })
	*upstream.ended = true
	upstream.server.Kill()
	if len(running) > 0 {
		t.Fatal("the action was not queued")
	}
	if r := <-running; code(r) != codes.OK {
		t.Errorf("the blocking action: %v", r)
	}
	r := <-waiting
	if code(r) != codes.OK || r.Result.GetExitCode() != 0 {
		t.Fatalf("the queued action: %v", r)
	}
	if got, want := server.get(r.Result.StdoutDigest), fmt.Sprintln(3+len(large)); got != want {
		t.Errorf("got output %q, want %q", got, want)
	}
}
