// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A javaBench executes actions that are requests to testdata/Builder.java, which runs the JDK's javac.
type javaBench struct {
	*toolBench
	java    string
	classes []*repb.FileNode // of the builder
}

func newJavaBench(t testing.TB, permitted bool) *javaBench {
	t.Helper()
	sandboxtest.Tool(t, "javac")
	javac := must.Get(filepath.EvalSymlinks(must.Get(exec.LookPath("javac"))(t)))(t)
	b := &javaBench{toolBench: newToolBench(t, permitted), java: filepath.Join(filepath.Dir(javac), "java")}
	dir := t.TempDir()
	if out, err := exec.Command(javac, "-d", dir, "testdata/Builder.java").CombinedOutput(); err != nil {
		t.Fatalf("javac: %v\n%s", err, out)
	}
	mark := &repb.NodeProperties{Properties: []*repb.NodeProperty{{Name: "bazel_tool_input"}}}
	for _, file := range must.Get(filepath.Glob(filepath.Join(dir, "*.class")))(t) {
		b.classes = append(b.classes, &repb.FileNode{
			Name: filepath.Base(file), Digest: b.blob(must.Get(os.ReadFile(file))(t)), NodeProperties: mark,
		})
	}
	return b
}

// A jar is the result of compiling sources.
type jar struct {
	compiled
	digest string
	bytes  []byte
}

// javac compiles the source A.java.
func (b *javaBench) javac(source string) jar {
	b.t.Helper()
	root := &repb.Directory{
		Files: []*repb.FileNode{
			{Name: "A.java", Digest: b.blob([]byte(source))},
			{Name: "flags", Digest: b.blob([]byte("out/a.jar\nA.java\n"))},
		},
		Directories: []*repb.DirectoryNode{{Name: "builder", Digest: b.message(&repb.Directory{Files: b.classes})}},
	}
	var stderr bytes.Buffer
	action := b.command(root, &repb.Command{
		Arguments:   []string{b.java, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", "builder", "Builder", "@flags"},
		OutputPaths: []string{"out/a.jar"},
	})
	j := jar{compiled: b.execute(&Task{Action: action, Stderr: &stderr})}
	j.stderr = stderr.String()
	for _, f := range j.Result.OutputFiles {
		d := must.Get(cas.FromProto(cas.SHA256, f.Digest))(b.t)
		j.digest, j.bytes = d.String(), must.Get(cas.ReadAll(b.t.Context(), b.in.Store, d, 1<<20))(b.t)
	}
	return j
}

// TestPersistentJavac: one JVM compiles several sources, to the same jars as a JVM for each. An error in a source fails
// its action, with javac's messages, but does not end the JVM.
func TestPersistentJavac(t *testing.T) {
	warm, cold := newJavaBench(t, true), newJavaBench(t, false)
	for n, text := range []string{"one", "two", "three"} {
		source := fmt.Sprintf("class A { String text = %q; Runnable r = () -> System.out.println(text); class B {} }\n", text)
		got, want := warm.javac(source), cold.javac(source)
		expect.That(t, got.Result.ExitCode == 0 && got.request == n+1 && want.request == 0 && got.stderr == "" && got.Message == "",
			"source %d: got exit code %d, request %d, %s, %s; cold: request %d", n, got.Result.ExitCode, got.request, got.stderr, got.Message, want.request)
		expect.That(t, got.digest == want.digest && bytes.HasPrefix(got.bytes, []byte("PK\x03\x04")) && bytes.Contains(got.bytes, []byte("A$B.class")),
			"source %d: got a jar of %d bytes, %s; cold: %s, %s", n, len(got.bytes), got.digest, want.digest, want.stderr)
	}
	bad := warm.javac("class A { int text = \"one\"; }\n")
	expect.That(t, bad.Result.ExitCode == 1 && bad.request == 4 && strings.Contains(bad.stderr, "A.java:1: error: incompatible types"),
		"a source with an error: got exit code %d, request %d, %q", bad.Result.ExitCode, bad.request, bad.stderr)
	expect.Equal(t, warm.javac("class A {}\n").request, 5, "after an error")
}

// BenchmarkPersistentJavac compares a request to a JVM that runs with an action that starts one.
func BenchmarkPersistentJavac(b *testing.B) {
	for name, permitted := range map[string]bool{"warm": true, "cold": false} {
		b.Run(name, func(b *testing.B) {
			bench := newJavaBench(b, permitted)
			n := 0
			compile := func() {
				if j := bench.javac(fmt.Sprintf("class A { int n = %d; }\n", n)); j.Result.ExitCode != 0 {
					b.Fatal(j.stderr)
				}
				n++
			}
			for range 10 { // the JVM starts, and compiles what it executes often
				compile()
			}
			for b.Loop() {
				compile()
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
		})
	}
}
