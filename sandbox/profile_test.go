// SPDX-License-Identifier: Apache-2.0

//go:build unix

package sandbox_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func TestProfileDefaults(t *testing.T) {
	p := sandbox.Profile{Args: []string{"cc"}, Env: []string{"B=2", "A=1", "TMPDIR"}, Outputs: []string{"/build/out", "/log"}}
	build := must.Get(sandbox.ForBuild(p))(t)
	l := build.Limits
	if l.Memory != 4<<30 || l.CPU != time.Hour || l.Processes != 128 || len(build.Network.Allow) > 0 {
		t.Errorf("got limits %+v, network %+v", l, build.Network)
	}
	env := []string{"A=1", "B=2", "HOME=/tmp", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	outputs := []sandbox.Output{{Target: "/build/out", Source: "build/out"}, {Target: "/log", Source: "log"}}
	expect.That(t, slices.Equal(build.Env, env) && slices.Equal(build.Outputs, outputs) && build.Dir == "/build/out",
		"got env %q, outputs %v, dir %s", build.Env, build.Outputs, build.Dir)
	test := must.Get(sandbox.ForTest(p))(t)
	if l.Processes = 1024; test.Limits != l {
		t.Errorf("limits of a test: got %+v, want %+v", test.Limits, l)
	}
	// Neither Spec has anything in common with the profile.
	p.Args[0] = "ld"
	expect.That(t, build.Args[0] == "cc", "the Spec changed with its profile")
}

func TestProfileFollowsLinks(t *testing.T) {
	dir := must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
	link := filepath.Join(dir, "link")
	must.Succeed(t, errors.Join(os.Mkdir(filepath.Join(dir, "real"), 0o755), os.Symlink("real", link)))
	p := sandbox.Profile{Args: []string{"cc"}, Tools: []sandbox.Input{{Target: "/tool", Source: filepath.ToSlash(link)}}}
	spec := must.Get(sandbox.ForBuild(p))(t)
	expect.Equal(t, spec.Inputs[0].Source, filepath.Join(dir, "real"), "source")
	expect.Equal(t, p.Tools[0].Source, filepath.ToSlash(link), "the profile's own tool was changed")
}

func TestProfileErrors(t *testing.T) {
	for name, c := range map[string]struct {
		profile sandbox.Profile
		want    error
	}{
		"no arguments":    {sandbox.Profile{}, sandbox.ErrSpec},
		"absent input":    {sandbox.Profile{Args: []string{"cc"}, Inputs: []sandbox.Input{{Target: "/x", Source: "/no/such/file"}}}, fs.ErrNotExist},
		"absent tool":     {sandbox.Profile{Args: []string{"cc"}, Tools: []sandbox.Input{{Target: "/no/such/tool"}}}, fs.ErrNotExist},
		"relative output": {sandbox.Profile{Args: []string{"cc"}, Outputs: []string{"out"}}, sandbox.ErrSpec},
		"invalid network": {sandbox.Profile{Args: []string{"cc"}, Network: []sandbox.Endpoint{{Host: "localhost", Port: 80}}}, sandbox.ErrSpec},
	} {
		if _, err := sandbox.ForBuild(c.profile); !errors.Is(err, c.want) {
			t.Errorf("%s: got error %v, want %v", name, err, c.want)
		}
	}
}
