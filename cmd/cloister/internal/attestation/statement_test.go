// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro"
)

// What repro found becomes a statement from whose runs the same verdict follows, whatever kind of output differs.
func TestStatementOfVerdict(t *testing.T) {
	digest := func(s string) *repb.Digest { return cas.SHA256.Sum([]byte(s)).Proto() }
	result := func(change func(*repb.ActionResult)) *repb.ActionResult {
		r := &repb.ActionResult{
			OutputFiles:       []*repb.OutputFile{{Path: "file", Digest: digest("file")}},
			OutputDirectories: []*repb.OutputDirectory{{Path: "dir", TreeDigest: digest("tree")}},
			OutputSymlinks:    []*repb.OutputSymlink{{Path: "link", Target: "file"}},
			StdoutDigest:      digest("said"),
		}
		change(r)
		return r
	}
	for name, change := range map[string]func(*repb.ActionResult){
		"file":       func(r *repb.ActionResult) { r.OutputFiles[0].Digest = digest("other") },
		"executable": func(r *repb.ActionResult) { r.OutputFiles[0].IsExecutable = true },
		"directory":  func(r *repb.ActionResult) { r.OutputDirectories[0].TreeDigest = digest("other") },
		"link":       func(r *repb.ActionResult) { r.OutputSymlinks[0].Target = "dir" },
		"no link":    func(r *repb.ActionResult) { r.OutputSymlinks = nil },
		"stdout":     func(r *repb.ActionResult) { r.StdoutDigest = digest("other") },
		"stderr":     func(r *repb.ActionResult) { r.StderrRaw = []byte("complaint") },
	} {
		v := &repro.Verdict{Action: cas.SHA256.Sum([]byte("action")).String(), Result: repro.Differs, Runs: []repro.Run{
			{Result: result(func(*repb.ActionResult) {})}, {Result: result(change)},
		}}
		s, err := OfVerdict(v)
		if err == nil {
			_, err = s.Encode()
		}
		expect.Error(t, err, nil, "%s", name)
	}
	same := &repro.Verdict{Action: cas.SHA256.Sum([]byte("action")).String(), Result: repro.Same, Runs: []repro.Run{
		{Result: result(func(*repb.ActionResult) {})},
		// What was said comes inline from one server and by name from another, and nothing as the empty blob.
		{Varied: []string{"umask 0077"}, Result: result(func(r *repb.ActionResult) {
			r.StdoutDigest, r.StdoutRaw, r.StderrDigest = nil, []byte("said"), digest("")
		})},
	}}
	s, err := OfVerdict(same)
	if err == nil {
		_, err = s.Encode()
	}
	expect.Error(t, err, nil)
	// An action without outputs is a statement about the action, and what is a list is one if it is empty.
	none := repro.Run{Result: &repb.ActionResult{}}
	varied := repro.Run{Varied: []string{"umask 0077"}, Result: none.Result}
	s = must.Get(OfVerdict(&repro.Verdict{Action: same.Action, Result: repro.Same, Runs: []repro.Run{none, varied}}))(t)
	if text, err := s.Encode(); err != nil || bytes.Contains(text, []byte("null")) || !bytes.Contains(text, []byte(`"outputs":[]`)) {
		t.Errorf("got %s, %v", text, err)
	}
}
