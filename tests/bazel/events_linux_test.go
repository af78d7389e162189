// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/must"
	bespb "google.golang.org/genproto/googleapis/devtools/build/v1"
)

// A shown build is the output of cloister invocation show.
type shown struct {
	Status, Exit, Stderr string
	Targets              []struct {
		Label, Rule, Outcome string
		Test                 struct {
			Status  string
			Runs    int
			Results []struct {
				Status string
				Files  []struct{ Name, Digest string }
			}
		}
	}
	CommandLines []struct{ Label string } `json:"command_lines"`
	Profile      struct{ Digest string }
	Metrics      struct {
		Wall int `json:"wall_ns"`
	}
}

// TestBuildEvents publishes the events of a build with tests that pass, fail and are flaky, and reads them back.
func TestBuildEvents(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	web := must.Get(loopback.Address())(t)
	must.Succeed(t, r.server.Stop())
	r.config.Args = append(r.config.Args, "--web", web)
	r.serve(t)
	for name, text := range map[string]string{
		"BUILD.bazel": `load("@rules_shell//shell:sh_test.bzl", "sh_test")
[sh_test(name = n, size = "small", srcs = [n + ".sh"]) for n in ["passes", "fails", "flaky"]]
`,
		"passes.sh": "exit 0\n",
		"fails.sh":  "echo the reason; exit 1\n",
		"flaky.sh":  "test \"$TEST_RANDOM_SEED\" = 2\n",
	} {
		path := filepath.Join(r.Workspace, "examples/events", name)
		must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must.Succeed(t, os.WriteFile(path, []byte("#!/bin/sh\n"[:10*min(1, strings.Count(name, ".sh"))]+text), 0o755))
	}
	const id = "5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f"
	build := r.bazel(t, "test", "--bes_backend=grpc://"+r.Endpoint, "--bes_results_url=http://"+web+"/i/", "--invocation_id="+id,
		"--runs_per_test=//examples/events:flaky@2", "--runs_per_test_detects_flakes", "//examples/events/...")
	expect.Equal(t, build.ExitCode, 3, "bazel: exit")
	expect.Text(t, build.Output, "http://"+web+"/i/"+id)
	page, err := http.Get("http://" + web + "/i/" + id)
	must.Succeed(t, err)
	defer page.Body.Close()
	text := must.Get(io.ReadAll(page.Body))(t)
	expect.Texts(t, string(text), []string{"TESTS_FAILED", "//examples/events:flaky", ">test.log</a>", ">Profile</a>", "Command line, original"})

	check := func() {
		t.Helper()
		var b shown
		must.Succeed(t, json.Unmarshal(r.cloister(t, "invocation", "show", id, "--json"), &b))
		expect.That(t, b.Status == "failed" && b.Exit == "TESTS_FAILED" && len(b.Targets) == 3 && b.Metrics.Wall > 0, "got %+v", b)
		expect.Text(t, b.Stderr, "//examples/events:fails")
		labels := ""
		for _, c := range b.CommandLines {
			labels += c.Label + " "
		}
		expect.Texts(t, labels, []string{"original", "canonical"})
		for _, target := range b.Targets {
			want := map[string]string{"passes": "passed", "fails": "failed", "flaky": "flaky"}[filepath.Base(strings.Replace(target.Label, ":", "/", 1))]
			expect.That(t, target.Outcome == "built" && target.Rule == "sh_test rule" && target.Test.Status == want, "got %+v, want %s", target, want)
			if want == "flaky" {
				expect.That(t, target.Test.Runs == 2 && len(target.Test.Results) == 2, "got %+v, want two runs", target.Test)
			}
			if want == "failed" {
				for _, f := range target.Test.Results[0].Files {
					if f.Name == "test.log" {
						expect.Text(t, string(r.cloister(t, "cas", "cat", f.Digest)), "the reason")
						want = ""
					}
				}
				expect.Equal(t, want, "", "the failed test has no log")
			}
		}
		profile := r.cloister(t, "cas", "cat", b.Profile.Digest)
		expect.That(t, strings.HasPrefix(string(profile), "\x1f\x8b"), "the profile is not compressed by gzip")
		file := filepath.Join(t.TempDir(), "trace.json")
		r.cloister(t, "invocation", "show", id, "--profile", file)
		joined := must.Get(os.ReadFile(file))(t)
		must.Be(t, json.Valid(joined), "the joined profile is not JSON")
		expect.Texts(t, string(joined), []string{`"build_id":"` + id, `"name":"run","cat":"stage"`, `"name":"TestRunner //examples/events:flaky","cat":"action"`})
	}
	check()
	r.killWhilePublishing(t)
	check()
}

// killWhilePublishing kills the server while a client publishes events, and continues with the first event that was not
// acknowledged.
func (r *rig) killWhilePublishing(t *testing.T) {
	const id = "a0b1c2d3-e4f5-4607-8819-2a3b4c5d6e7f"
	event := func(n int64) *bespb.PublishBuildToolEventStreamRequest {
		e := &bespb.BuildEvent{}
		if n == 100 {
			e.Event = &bespb.BuildEvent_ComponentStreamFinished{}
		}
		return &bespb.PublishBuildToolEventStreamRequest{OrderedBuildEvent: &bespb.OrderedBuildEvent{
			StreamId: &bespb.StreamId{InvocationId: id}, SequenceNumber: n, Event: e,
		}}
	}
	publish := func(first int64, received func(n int64)) {
		s := must.Get(bespb.NewPublishBuildEventClient(grpctest.Dial(t, r.Endpoint)).PublishBuildToolEventStream(context.WithoutCancel(t.Context())))(t)
		go func() {
			for n := first; n <= 100; n++ {
				if s.Send(event(n)) != nil {
					break // Recv returns why
				}
			}
			s.CloseSend()
		}()
		for {
			m, err := s.Recv()
			if err != nil {
				break
			}
			received(m.SequenceNumber)
		}
	}
	var last int64
	publish(1, func(n int64) {
		if last = n; n == 10 {
			r.server.Kill()
		}
	})
	must.Be(t, last >= 10, "the last acknowledged event is %d", last)
	r.serve(t)
	publish(last+1, func(n int64) {
		last++
		expect.Equal(t, n, last, "acknowledged")
	})
	expect.Equal(t, last, 100, "last acknowledged")
	expect.Text(t, string(r.cloister(t, "invocation", "show", id)), id)
}
