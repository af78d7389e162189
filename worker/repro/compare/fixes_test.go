// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"slices"
	"strings"
	"testing"
)

// fixFrom returns the text of the first fix of a difference, or "".
func fixFrom(t *testing.T, d Difference, m *Making) string {
	t.Helper()
	all := FixesOf(&d, m)
	if len(all) == 0 {
		return ""
	}
	return all[0].Text
}

func TestFixesDependOnPrograms(t *testing.T) {
	member := Difference{Cause: Timestamp, Format: "tar", Within: []string{"deb", "gzip"}}
	plain := Difference{Cause: Timestamp, Format: "tar"}
	for _, row := range []struct {
		name string
		d    Difference
		m    *Making
		want string
	}{
		{"nothing known", plain, nil, FixFor(Timestamp, "tar")},
		{"tar ran", plain, &Making{Programs: []string{"/usr/bin/tar"}}, FixFor(Timestamp, "tar")},
		{"python ran", plain, &Making{Programs: []string{"/usr/bin/python3.11"}}, "in Python tarfile: add(..., filter=...) with a function that sets mtime = 0"},
		{"member of a deb", member, &Making{Programs: []string{"/usr/bin/tar", "/usr/bin/dpkg-deb"}}, "set SOURCE_DATE_EPOCH for dpkg-deb"},
		{"named in a script", Difference{Cause: Timestamp, Format: "text"}, &Making{Args: []string{"sh", "-c", "cd x && javadoc -d out A.java"}}, "javadoc -notimestamp"},
		{"target system and version", Difference{Cause: Random, Format: "elf"}, &Making{Programs: []string{"/usr/bin/x86_64-linux-gnu-gcc-12"}}, "gcc -frandom-seed=FILE, with the name of the source file"},
		{"not a command", Difference{Cause: Timestamp, Format: "text"}, &Making{Args: []string{"sh", "-c", "echo javadoc"}}, FixFor(Timestamp, "text")},
	} {
		if got := fixFrom(t, row.d, row.m); got != row.want {
			t.Errorf("%s: got %q, want %q", row.name, got, row.want)
		}
	}
}

// No fix is suggested that the command has.
func TestFixesInUseAreNotSuggested(t *testing.T) {
	for _, row := range []struct {
		d Difference
		m Making
	}{
		{Difference{Cause: Timestamp, Format: "text"}, Making{Args: []string{"date"}, Env: []string{"SOURCE_DATE_EPOCH=1"}}},
		{Difference{Cause: Timestamp, Format: "gzip"}, Making{Args: []string{"sh", "-c", "gzip -n x"}}},
		{Difference{Cause: Path, Format: "elf"}, Making{Args: []string{"gcc", "-ffile-prefix-map=/a=/b", "-c", "x.c"}}},
		{Difference{Cause: HashSeed, Format: "text"}, Making{Args: []string{"sh", "-c", "PYTHONHASHSEED=1 python3 x.py"}}},
		{Difference{Cause: Owner, Format: "tar"}, Making{Args: []string{"tar", "--owner=0", "-cf", "x", "y"}}},
	} {
		without := row.m
		without.Env = nil
		without.Args = slices.Clone(row.m.Args[:1])
		before := FixesOf(&row.d, &without)
		after := FixesOf(&row.d, &row.m)
		for _, f := range after {
			if row.m.has(f) {
				t.Errorf("%v: suggests %q", row.m, f.Text)
			}
		}
		if len(before) == 0 || slices.ContainsFunc(FixesOf(&row.d, &row.m), func(f *Fix) bool { return f == before[0] && row.m.has(f) }) {
			t.Errorf("%v: got %d fixes without and %d with", row.m, len(before), len(after))
		}
	}
	d := Difference{Cause: Owner, Format: "tar"}
	if got := fixFrom(t, d, &Making{Args: []string{"tar", "--owner=0", "-cf", "x", "y"}}); got == FixFor(Owner, "tar") {
		t.Errorf("suggests %q again", got)
	}
}

func TestFixesApplyToCommands(t *testing.T) {
	sh := func(script string) []string { return []string{"/bin/sh", "-ec", script} }
	for _, row := range []struct {
		cause    Cause
		format   string
		programs string
		args     []string
		want     []string // nil if it does not apply
	}{
		{Timestamp, "gzip", "gzip pigz", sh("cat x | gzip -9 > out; echo gzip"), sh("cat x | gzip -n -9 > out; echo gzip")},
		{Timestamp, "gzip", "gzip pigz", []string{"/usr/bin/gzip", "x"}, []string{"/usr/bin/gzip", "-n", "x"}},
		{Timestamp, "gzip", "gzip pigz", []string{"echo", "gzip"}, nil},
		{Timestamp, "ar", "ar ranlib", sh("ar crU lib.a x.o"), sh("ar crD lib.a x.o")},
		{Timestamp, "ar", "ar ranlib", []string{"ar", "rcU", "out", "x\ny"}, nil},
		{Timestamp, "ar", "ar ranlib", []string{"ar", "rcU", "out", "x"}, []string{"ar", "rcD", "out", "x"}},
		{Timestamp, "pyc", "", sh("python3 -m compileall -q x"), sh("python3 -m compileall --invalidation-mode=unchecked-hash -q x")},
		{Owner, "deb", "dpkg-deb", sh("set -e\nif true; then dpkg-deb -b x; fi"), sh("set -e\nif true; then dpkg-deb --root-owner-group -b x; fi")},
		{Path, "elf", "rustc", sh("A=b rustc x.rs"), sh("A=b rustc --remap-path-prefix=$PWD=. x.rs")},
		{Path, "elf", "rustc", []string{"rustc", "x.rs"}, nil}, // nothing expands $PWD
		{Mode, "", "", sh("tar cf out x"), sh("umask 022\ntar cf out x")},
		{Mode, "", "", []string{"tar", "cf", "out", "x"}, nil},
		{MemberOrder, "", "find", sh("find . -type f | tee out"), sh("find . -type f | LC_ALL=C sort | tee out")},
		{Timestamp, "jar", "jar", sh("jar -c -f out A.class"), sh("jar --date=1980-01-01T00:00:02Z -c -f out A.class")},
		{MemberOrder, "ar", "find", sh("ar rcD out $(find . -name '*.o')"), sh("ar rcD out $(find . -name '*.o' | LC_ALL=C sort)")},
		{Path, "", "", sh(`gcc -c "$PWD/a.c"`), sh(`gcc -c "./a.c"`)},
		{Hostname, "rpm", "rpmbuild rpm", sh("rpmbuild -bb x"), sh(`rpmbuild -D "_buildhost localhost" -bb x`)},
	} {
		i := slices.IndexFunc(fixes, func(f Fix) bool {
			return f.Cause == row.cause && f.Format == row.format && f.Programs == row.programs && f.Mechanical()
		})
		if i < 0 {
			t.Fatalf("no such fix: %+v", row)
		}
		args := slices.Clone(row.args)
		got, ok := fixes[i].Apply(args)
		if ok != (row.want != nil) || ok && !slices.Equal(got, row.want) || !slices.Equal(args, row.args) {
			t.Errorf("%q: got %q, %t, want %q", row.args, got, ok, row.want)
		}
	}
}

// Expressions in the table compile, and what is to be applied is mentioned by the text.
func TestFixesAreWellFormed(t *testing.T) {
	for i := range fixes {
		f := &fixes[i]
		if f.Text == "" || len(f.Args) > 0 && f.Programs == "" || len(f.Args) > 0 && f.Swap[0] != "" {
			t.Errorf("fix %q of %s: arguments need a program and no expression", f.Text, f.Cause)
		}
		if _, ok := f.Apply([]string{"sh", "-c", "true"}); ok && len(f.Args) > 0 {
			t.Errorf("fix %q of %s applies to a command without its program", f.Text, f.Cause)
		}
	}
}

// A script may be long, and each of a verdict's differences asks for its fixes: this would take hours if each fix read it.
func TestLongScriptsAreSearchedOnce(t *testing.T) {
	m := &Making{Args: []string{"sh", "-c", strings.Repeat("echo a b c d e f\n", 16<<10)}}
	for range 200 {
		for _, row := range Causes {
			FixesOf(&Difference{Cause: row.Cause, Format: "text"}, m)
		}
	}
}
