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
		{MemberOrder, "", "ls", sh("ls -U x > out"), sh("ls -1 x > out")},
		{Address, "", "", []string{"./a", "b"}, []string{"setarch", "-R", "./a", "b"}},
		{Timestamp, "tar", "git", sh("git archive $(git write-tree)"), sh("git archive $(git commit-tree -m tree $(git write-tree))")},
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

// Each fix of a source changes a script in a form that programs usually have, and no script with another meaning.
func TestFixesApplyToSources(t *testing.T) {
	const pythonTime = `int(__import__("os").environ["SOURCE_DATE_EPOCH"])`
	applied := map[*Fix]bool{}
	for _, row := range []struct {
		cause        Cause
		script, want string // want is "" if none applies
	}{
		{Timestamp, "awk 'BEGIN { srand(); }'", "awk 'BEGIN { srand(1); }'"},
		{Timestamp, "perl -e 'print scalar localtime, 1'", "perl -e 'print scalar gmtime($ENV{SOURCE_DATE_EPOCH}), 1'"},
		{Timestamp, "perl -e 'print gmtime($t)'", ""},
		{Timestamp, "perl -e '$t = time; f()'", "perl -e '$t = $ENV{SOURCE_DATE_EPOCH}; f()'"},
		{Timestamp, "perl -e '$t = uptime; f()'", ""},
		{Timestamp, "python3 -c 'f(time.time())'", "python3 -c 'f(" + pythonTime + ")'"},
		{Timestamp, "python3 -c 'datetime.datetime.now()'", "python3 -c 'datetime.datetime.utcfromtimestamp(" + pythonTime + ")'"},
		{Timestamp, "node -e 'f(new Date())'", "node -e 'f(new Date(process.env.SOURCE_DATE_EPOCH * 1000))'"},
		{Timestamp, "node -e 'f(new Date(0))'", ""},
		{Timestamp, "jq -n '{at: now}'", "jq -n '{at: (env.SOURCE_DATE_EPOCH | tonumber)}'"},
		{Timestamp, "jq -n '{at: known}'", ""},
		{Timestamp, "tclsh <<< 'puts [clock seconds]'", "tclsh <<< 'puts $::env(SOURCE_DATE_EPOCH)'"},
		{Timestamp, "sqlite3 a 'SELECT current_timestamp'", "sqlite3 a 'SELECT '2020-01-01 00:00:00''"},
		{Timestamp, "python3 -c 'gzip.open(\"a\", \"wb\")'", "python3 -c 'gzip.GzipFile(\"a\", \"wb\", mtime=0)'"},
		{Timestamp, "python3 -c 'f(PycInvalidationMode.TIMESTAMP)'", "python3 -c 'f(PycInvalidationMode.UNCHECKED_HASH)'"},
		{Timestamp, "python3 -c 't.add(a)'", "python3 -c 't.add(a, filter=lambda m: [setattr(m, *kv) for kv in dict(mtime=0).items()] and m)'"},
		{Timestamp, "x; A=b /usr/bin/python3 -m x", "x; find . -type f -exec touch -d @315532800 {} +; A=b /usr/bin/python3 -m x"},
		{Timestamp, "echo python3", ""},
		{Path, "f=$(mktemp)", "f=$(touch /tmp/tmp.fixed && echo /tmp/tmp.fixed)"},
		{Path, "f=$(mktemp -d)", ""},
		{Owner, "echo by $(id -un)", "echo by $(echo nobody)"},
		{Owner, "whoami | xz > out", "echo nobody | xz > out"},
		{Owner, "echo whoami", ""},
		{Owner, "python3 -c 't.add(a)'", `python3 -c 't.add(a, filter=lambda m: [setattr(m, *kv) for kv in dict(uid=0, gid=0, uname="", gname="").items()] and m)'`},
		{MemberOrder, "python3 -c 'os.listdir(a)'", "python3 -c 'sorted(os.listdir(a))'"},
		{HashSeed, "set -e\nf 2> out\ng", "set -e\nf 2>&1 | LC_ALL=C sort > out\ng"},
		{HashSeed, "f > out && g", ""},
		{Parallel, "f >out", "f >&1 | LC_ALL=C sort > out"},
		{Random, "bash -c 'echo $RANDOM'", "bash -c 'RANDOM=1; echo $RANDOM'"},
		{Random, "python3 -c 'uuid.uuid4()'", "python3 -c 'uuid.uuid5(uuid.NAMESPACE_URL, \"name\")'"},
		{Random, "python3 -c 'import random'", "python3 -c 'import random; random.seed(1)'"},
		{Random, "openssl passwd -6 x", "openssl passwd -salt constant -6 x"},
		{Random, "openssl rand 8", ""},
		{Random, "sqlite3 a 'SELECT randomblob(9)'", "sqlite3 a 'SELECT zeroblob(9)'"},
		{Random, "head -c 9 /dev/urandom", "head -c 9 /dev/zero"},
		{Hostname, "echo $(uname -n)", "echo $(echo localhost)"},
		{Hostname, "a; hostname -f > out", "a; echo localhost > out"},
		{Hostname, "hostname=x", ""},
		{Hostname, "python3 -c 'f(socket.gethostname())'", `python3 -c 'f("localhost")'`},
		{ProcessID, "f > /tmp/$$", "f > /tmp/1"},
	} {
		d := Difference{Cause: row.cause}
		got := ""
		for i := range sourceFixes {
			f := &sourceFixes[i]
			m := &Making{Args: []string{"sh", "-c", row.script}}
			if f.Cause != d.Cause || f.Swap[0] == "" || f.Programs != "" && !m.Ran(f.Programs) {
				continue
			}
			if args, ok := f.Apply(m.Args); ok && (row.want == "" || args[2] == row.want) {
				got, applied[f] = args[2], true
			}
		}
		if got != row.want {
			t.Errorf("%q: got %q, want %q", row.script, got, row.want)
		}
	}
	for i := range sourceFixes {
		if f := &sourceFixes[i]; f.Swap[0] != "" && !applied[f] {
			t.Errorf("no row for the fix %q of %s", f.Text, f.Cause)
		}
	}
}

// A variable that a changed source reads does not mean that the source reads it already.
func TestVariablesOfSourcesAreNotTheFix(t *testing.T) {
	m := &Making{Args: []string{"sh", "-c", "perl -e 'print time, 1'"}, Env: []string{epoch}}
	if got := fixFrom(t, Difference{Cause: Timestamp, Format: "text"}, m); !strings.HasPrefix(got, "in Perl ") {
		t.Errorf("got %q", got)
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

// A script may be long, and each of a verdict's differences asks for its fixes: this would take hours if each fix read
// it.
func TestLongScriptsAreSearchedOnce(t *testing.T) {
	m := &Making{Args: []string{"sh", "-c", strings.Repeat("echo a b c d e f\n", 16<<10)}}
	for range 200 {
		for _, row := range Causes {
			FixesOf(&Difference{Cause: row.Cause, Format: "text"}, m)
		}
	}
}
