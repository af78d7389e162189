// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/containers"
	"github.com/cloister-build/cloister/tests/must"
)

// TestBuildInContainerImages builds a target in the image that its exec_properties name, and the same target in another
// image. Each action sees its own image and nothing of this machine, and a second build takes both from the cache.
func TestBuildInContainerImages(t *testing.T) {
	for name, start := range map[string]func(testing.TB) string{
		"registry in this process": containers.Registry, "registry of Docker": containers.RegistryProcess,
	} {
		t.Run(name, func(t *testing.T) { testBuildInContainerImages(t, start(t)) })
	}
}

func testBuildInContainerImages(t *testing.T, registry string) {
	r := newRig(t, nil)
	r.restart(t, func() { r.config.Args = append(r.config.Args, "--images="+registry) })
	programs := []string{"bash", "sh", "cat", "ls", "dirname", "mkdir", "rm", "touch"}
	var text strings.Builder
	for _, mark := range []string{"one", "two"} {
		image := containers.Push(t, registry+"/tools:"+mark, containers.Image(t, mark, programs...))
		fmt.Fprintf(&text, `
genrule(
    name = %q,
    outs = [%q],
    cmd = "cat /etc/marker > $@; ls -d /usr/share /etc/passwd >> $@ 2>/dev/null || true",
    exec_properties = {"container-image": "docker://%s"},
)
`, mark, mark+".txt", image)
	}
	pkg := filepath.Join(r.Workspace, "images")
	must.Succeed(t, os.Mkdir(pkg, 0o755))
	must.Succeed(t, os.WriteFile(filepath.Join(pkg, "BUILD.bazel"), []byte(text.String()), 0o644))
	for _, kind := range []string{"remote", "remote cache hit"} {
		r.clean(t)
		build := r.bazel(t, "build", "//images:all")
		must.Be(t, build.ExitCode == 0 && build.Processes()[kind] == 2,
			"exit %d, want 0 and 2 times %s\n%s", build.ExitCode, kind, build.Output)
		outputs := must.Get(r.Outputs("images"))(t)
		for _, mark := range []string{"one", "two"} {
			expect.Equal(t, string(must.Get(os.ReadFile(filepath.Join(outputs, mark+".txt")))(t)), mark+"\n", "%s",
				mark)
		}
	}
}
