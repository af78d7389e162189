// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

// A build makes a file from sources.
type build struct {
	tool string
	// script makes the file "out" in the working directory.
	script  string
	sources map[string]string
}

// run makes the file in a new directory called dir, and returns its content and facts.
func (b *build) run(t *testing.T, dir string, env ...string) (string, *Facts) {
	t.Helper()
	sandboxtest.Tool(t, b.tool)
	dir = filepath.Join(t.TempDir(), dir)
	must.Succeed(t, os.MkdirAll(dir, 0o755))
	for name, text := range b.sources {
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-ec", b.script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), append([]string{"LC_ALL=C", "GOFLAGS=", "GO111MODULE=on", "GOWORK=off"}, env...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", b.script, err, out)
	}
	data := must.Get(os.ReadFile(filepath.Join(dir, "out")))(t)
	return string(data), &Facts{Root: dir}
}

func where(d *Difference) string { return strings.Join(d.Where[1:], "/") }

func dump(t *testing.T, ds []Difference) {
	t.Helper()
	for _, d := range ds {
		t.Logf("%q %q +%#x %q %q %q", where(&d), d.What, d.Offset, d.A, d.B, d.Cause)
	}
}

const (
	dateC = "#include <stdio.h>\nint main(void) { puts(\"built \" __DATE__ \" at \" __TIME__); return 0; }\n"
	plain = "#include <stdio.h>\nint main(void) { puts(\"hello\"); return 0; }\n"
	fileC = "#include <stdio.h>\nint main(void) { puts(\"this is \" __FILE__); return 0; }\n"
)

func TestELFNamesThePlaceAndTheCause(t *testing.T) {
	c := func(script, text string) build {
		return build{"gcc", script, map[string]string{"a.c": text}}
	}
	parts := map[string]string{"a.c": plain, "b.c": "int b(int x){return x*2;}", "c.c": "int c(int x){return x*3;}"}
	program := map[string]string{"a.go": "package main\n\nfunc main() { panic(1) }\n", "go.mod": "module x.test/x\n\ngo 1.21\n"}
	for _, row := range []struct {
		name       string
		build      build
		dirA, dirB string // in addition to the temporary one
		envA, envB string
		// the first difference
		where, what string
		cause       Cause
	}{
		{
			"date", c("gcc -O1 -o out a.c", dateC), "x", "x", "SOURCE_DATE_EPOCH=1000000000", "SOURCE_DATE_EPOCH=1100000000",
			".rodata", "text", BuildDate,
		},
		{
			"date in an object", c("gcc -O1 -c -o out a.c", dateC), "x", "x", "SOURCE_DATE_EPOCH=1000000000", "SOURCE_DATE_EPOCH=1100000000",
			".rodata.str1.1", "text", BuildDate,
		},
		{"directory in an object", c("gcc -g -O1 -c -o out a.c", plain), "one", "other", "", "", ".debug_line_str", "text", Path},
		{"directory in a program", c("gcc -g -O1 -o out a.c", plain), "one", "other", "", "", ".debug_line_str", "text", Path},
		{"directory, packed", c("gcc -g -gz=zlib -O1 -o out a.c", plain), "one", "other", "", "", ".debug_line_str", "text", Path},
		{"directory, DWARF 4", c("gcc -g -gdwarf-4 -O1 -o out a.c", plain), "one", "other", "", "", ".debug_str", "text", Path},
		{
			"directory, split", c("gcc -g -gsplit-dwarf -O1 -c -o a.o a.c; mv a.dwo out", plain), "one", "other", "", "",
			".debug_line.dwo", "text", Path,
		},
		{
			"directory, split, DWARF 4", c("gcc -g -gdwarf-4 -gsplit-dwarf -O1 -c -o a.o a.c; mv a.dwo out", plain), "one", "other", "", "",
			".debug_str.dwo", "text", Path,
		},
		{
			"directory, packed by zstd", c("gcc -g -c -o out a.c; objcopy --compress-debug-sections=zstd out", plain), "one", "other", "", "",
			".debug_line_str", "text", Path,
		},
		{
			"directory, 32 bits", c("gcc -m32 -g -O1 -c -o out a.c", "int f(int x) { return x + 1; }\n"), "one", "other", "", "",
			".debug_line_str", "text", Path,
		},
		{"path", c("gcc -O1 -o out $PWD/a.c", fileC), "one", "other", "", "", ".rodata", "text", Path},
		{"build id", c("gcc -O1 -Wl,--build-id=uuid -o out a.c", plain), "one", "one", "", "", ".note.gnu.build-id", "build id", BuildID},
		{
			"order of objects",
			build{"gcc", "gcc -O1 -c a.c b.c c.c; gcc -o out $ORDER", parts},
			"x", "x", "ORDER=a.o b.o c.o", "ORDER=a.o c.o b.o",
			".strtab", "order of texts", MemberOrder,
		},
		{"stripped", c("gcc -O1 a.c -o out; $STRIP", plain), "x", "x", "STRIP=strip out", "STRIP=true", "", "section", Unknown},
		{"debug link", c("gcc -g a.c -o a; objcopy --only-keep-debug a a.debug; strip a; objcopy --remove-section=.note.gnu.build-id "+
			"--add-gnu-debuglink=a.debug a out", plain), "one", "other", "", "", ".gnu_debuglink", "build id", BuildID},
		{"link-time optimization", c("gcc -flto -O1 -c a.c -o out", plain), "x", "x", "", "", "", "names of sections for the linker", Random},
		{
			"a constant in code", c("gcc -O1 a.c -DX=$X -o out", "#include <stdio.h>\nint main(void) { return printf(\"%d\", X); }\n"), "x", "x",
			"X=77777", "X=88888", ".text", "bytes", Unknown,
		},
		{
			"shared library",
			build{
				"g++", "g++ -g -shared -fPIC -O1 a.cc -o out",
				map[string]string{"a.cc": "namespace { int n; }\nint g() { return ++n; }\n"},
			},
			"one", "other", "", "",
			".debug_line_str", "text", Path,
		},
		{"go program", build{"go", "go build -o out .", program}, "one", "other", "", "", ".gopclntab", "text", Path},
		{
			"go program with a time",
			build{"go", "go build -ldflags=-X=main.built=$BUILT -o out .", program},
			"x", "x", "BUILT=2026-11-22T01:02:03Z", "BUILT=2026-11-23T01:02:03Z",
			".rodata", "text", Timestamp,
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			a, factsA := row.build.run(t, row.dirA, row.envA)
			b, factsB := row.build.run(t, row.dirB, row.envB)
			ds := blobs(t, "out", a, b, Known{factsA, factsB})
			if len(ds) == 0 {
				t.Fatal("no difference")
			}
			if d := ds[0]; where(&d) != row.where || d.What != row.what || d.Cause != row.cause {
				t.Errorf("got %q %q, cause %q, want %q %q, cause %q", where(&d), d.What, d.Cause, row.where, row.what, row.cause)
			}
			for _, d := range ds {
				if strings.Contains(d.What, "build id") && len(ds) > 1 && row.cause != BuildID &&
					(d.Cause != row.cause || !strings.Contains(d.What, "follows")) {
					t.Errorf("%q, cause %q, is reported as a cause of its own", d.What, d.Cause)
				}
				if strings.HasPrefix(d.What, "bytes") && row.cause != Unknown {
					t.Errorf("%s +%#x is reported as a difference of its own", where(&d), d.Offset)
				}
				if ofDirectory := row.build.tool == "go" && d.Cause == Path; d.Cause != row.cause && d.Cause != Unknown && row.cause != Unknown && !ofDirectory {
					t.Errorf("%s %q: cause %q beside %q", where(&d), d.What, d.Cause, row.cause)
				}
			}
			if t.Failed() {
				dump(t, ds)
			}
		})
	}
}
