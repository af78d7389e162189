// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/must"
)

// TestInputsArePrefetchedWhileQueued checks that a queued action runs although the upstream server with its inputs
// stops before.
func TestInputsArePrefetchedWhileQueued(t *testing.T) {
	t.Parallel()
	upstream := serve(t)
	metrics := must.Get(loopback.Address())(t)
	server := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Jobs: 1, Args: []string{
		"--cas", "grpc://" + upstream.server.Addr, "--cas-write", "back", "--drain-timeout", "1s", "--metrics", metrics,
	}})
	fetched := func() int {
		resp, err := http.Get("http://" + metrics + "/metrics")
		must.Succeed(t, err)
		defer resp.Body.Close()
		text := must.Get(io.ReadAll(resp.Body))(t)
		var n int
		_, value, _ := strings.Cut(string(text), "\ncloister_cas_upstream_fetched_total ")
		fmt.Sscan(value, &n)
		return n
	}

	waiting := make(chan *answer, 1)
	blocking := server.block()
	// the action, its command, three Directories and three files
	next := upstream.prepare(job{script: "cat a d/b e/c | wc -c", files: map[string]file{
		"a": {text: "a"}, "d/b": {text: "bb"}, "e/c": {text: large},
	}})
	before := fetched()
	go func() { waiting <- server.request(next, nil) }()
	must.Hold(t, "prefetched", func() bool { return fetched() == before+8 })
	*upstream.ended = true
	upstream.server.Kill()
	blocking.end()
	got, _ := server.wantSuccess("the queued action", <-waiting)
	if want := fmt.Sprintln(3 + len(large)); got != want {
		t.Errorf("got output %q, want %q", got, want)
	}
}
