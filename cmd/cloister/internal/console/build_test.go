// SPDX-License-Identifier: Apache-2.0

package console

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestBuildPage shows everything that Bazel publishes, with hostile texts.
func TestBuildPage(t *testing.T) {
	blob := buildevents.File{Name: evil, Instance: "main", Digest: cas.SHA256.Sum([]byte("x"))}
	inline := buildevents.File{Name: evil, Contents: evil}
	b := &buildevents.Build{
		Header: buildevents.Header{Caller: evil, Facts: buildevents.Facts{
			Status: "failed", Exit: evil, Command: evil, Patterns: []string{evil}, TestCount: 1,
		}},
		User: evil, Host: evil, CommandLines: []buildevents.CommandLine{{Label: evil, Args: []string{evil}}},
		Targets: []*buildevents.Target{{
			Label: evil, Rule: evil, Outcome: "failed", Message: evil, Outputs: []buildevents.File{blob, inline},
			Test: &buildevents.Test{Status: "flaky", Results: []buildevents.TestResult{{Run: 1, Status: "passed", Files: []buildevents.File{blob}}}},
		}},
		FailedActions: []buildevents.Action{{Label: evil, Mnemonic: evil, Message: evil, Stdout: &inline, Stderr: &blob}},
		Problems:      []buildevents.Problem{{Label: evil, Reason: "skipped", Description: evil}},
		Metrics:       &buildevents.Metrics{Runners: map[string]int32{evil: 1}},
		Logs:          []buildevents.File{inline}, Profile: &blob, Coverage: []buildevents.File{blob}, Stdout: evil, Stderr: evil, Missing: 1,
	}
	d := &invocationData{Build: b}
	var out bytes.Buffer
	must.Succeed(t, templates()["invocation.html"].ExecuteTemplate(&out, "layout.html", &view{Data: d}))
	body := out.String()
	expect.That(t, !strings.Contains(body, "<script>") && strings.Contains(body, "&lt;script&gt;"), "got %s", body)
	expect.Texts(t, body, []string{
		"/cas/" + strings.Replace(blob.Digest.String(), "/", "-", 1) + "?instance=main", "<h2>Failed actions</h2>", "<h2>Tests</h2>", "<td>flaky",
		"<h2>Targets</h2>", "<h2>Coverage</h2>", "Profile</a>", "<h2>Bazel output</h2>", "1 events exceeded",
	})
}

// TestLargeBuildsHaveAPage: the page of a large build shows a part of it, the failures first.
func TestLargeBuildsHaveAPage(t *testing.T) {
	b := &buildevents.Build{}
	for i := range 20_000 {
		target := &buildevents.Target{Label: fmt.Sprint("//a:", i), Outcome: "built"}
		for range 100 {
			target.Outputs = append(target.Outputs, buildevents.File{Name: "out", Digest: cas.SHA256.Sum(nil)})
		}
		b.Targets = append(b.Targets, target)
	}
	b.Targets[19_999].Outcome = "failed"
	d := &invocationData{Build: b, Shortened: shorten(b)}
	var out buffer
	must.Succeed(t, templates()["invocation.html"].ExecuteTemplate(&out, "layout.html", &view{Data: d}))
	expect.Texts(t, out.String(), []string{"//a:19999<", "//a:0<", "shows only some of the targets"})
	small := &buildevents.Build{Targets: []*buildevents.Target{{Label: "//a"}}}
	expect.That(t, !shorten(small) && len(small.Targets) == 1, "%+v", small)
}
