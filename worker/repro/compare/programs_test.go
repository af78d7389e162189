// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// hostFile returns the beginning of a script that sets $f to a file of the host, which a sandbox may hide.
func hostFile(path string) string { return "f=" + path + "; test -r $f || { echo no $f; exit 77; }; " }

// Each program is irreproducible for one reason. The facts are those that Cloister would know.
func TestProgramsShowTheirCause(t *testing.T) {
	python := []string{"python3"}
	for _, row := range []struct {
		name       string
		a, b       string // scripts
		tools      []string
		envA, envB []string
		facts      func(a, b *Facts)
		want       Cause
	}{
		{name: "date", a: "date > out", b: "date -d tomorrow > out", want: Timestamp},
		{name: "seconds", a: "date +built-%s > out", b: "date -d tomorrow +built-%s > out", want: Timestamp},
		{name: "python's time", tools: python, a: `python3 -c 'import time; print("made", time.time())' > out`, want: Timestamp},
		{
			name: "another zone", a: "date -d @1795308271 > out", envB: []string{"TZ=XYZ-14"}, want: Zone,
			facts: func(a, b *Facts) {
				a.Start, a.End, a.Zone = time.Unix(1795308271, 0), time.Unix(1795308272, 0), "UTC"
				b.Start, b.End, b.Zone = a.Start, a.End, "XYZ-14"
			},
		},
		{
			name: "working directory", a: "mkdir -p in/a; cd in/a; echo 'built in' $(basename $(dirname $PWD))/$(basename $PWD) > ../../out",
			b: "mkdir -p in/b; cd in/b; echo 'built in' $(basename $(dirname $PWD))/$(basename $PWD) > ../../out", want: Path,
			facts: func(a, b *Facts) { a.Root, b.Root = "in/a", "in/b" },
		},
		{name: "temporary file", tools: []string{"mktemp"}, a: "f=$(mktemp); echo from $f > out; rm $f", want: Path},
		{
			name: "variable", a: "env | sort > out", envA: []string{"PAD=x"}, envB: []string{"PAD=yyyyyy"}, want: Environment,
			facts: func(a, b *Facts) { a.Env, b.Env = []string{"PAD=x"}, []string{"PAD=yyyyyy"} },
		},
		{
			name: "size of the environment", a: "env -i PAD=x env | wc -c > out", b: "env -i PAD=yyyyyy env | wc -c > out", want: Environment,
			facts: func(a, b *Facts) { a.Env, b.Env = []string{"PAD=x"}, []string{"PAD=yyyyyy"} },
		},
		{
			name: "user", tools: python, a: `python3 -c 'import getpass; print("by", getpass.getuser())' > out`, envA: []string{"LOGNAME=builder"}, envB: []string{"LOGNAME=alice"},
			want: Owner, facts: func(a, b *Facts) { a.User, b.User = "builder", "alice" },
		},
		{
			name: "host", tools: []string{"unshare", "hostname"}, a: "unshare -ru true || exit 77; unshare -ru sh -c 'hostname one-host; uname -n' > out", b: "unshare -ru sh -c 'hostname other; uname -n' > out",
			want: Hostname, facts: func(a, b *Facts) { a.Hostname, b.Hostname = "one-host", "other" },
		},
		{name: "umask", a: "umask 022; echo x > f; ls -l f | cut -c1-10 > out", b: "umask 077; echo x > f; ls -l f | cut -c1-10 > out", want: Mode},
		{
			name: "octal mode", a: "umask 022; echo x > f; stat -c %a f > out", b: "umask 077; echo x > f; stat -c %a f > out", want: Mode,
			facts: func(a, b *Facts) { a.Umask, b.Umask = 0o022, 0o077 },
		},
		{name: "number of the process", a: "echo pid $$ > out", b: "(:); (:); sh -c 'echo pid $$ > out'", want: ProcessID},
		{
			name: "processors", tools: []string{"taskset", "nproc"}, a: "taskset -c 0 nproc > out", b: "echo 2 > out", want: Processors,
			facts: func(a, b *Facts) { a.CPUs, b.CPUs = 1, 2 },
		},
		{name: "python's objects", tools: python, a: `python3 -c 'print(object())' > out`, b: `python3 -c 'x = bytearray(1 << 22); print(object())' > out`, want: Address},
		{
			name: "python's sets", tools: python, a: `python3 -c 'print({"one", "two", "three", "four", "five", "six"})' > out`,
			envA: []string{"PYTHONHASHSEED=1"}, envB: []string{"PYTHONHASHSEED=2"}, want: HashSeed,
		},
		{
			name: "keys of a set, by lines", tools: python, a: `python3 -c 'print("\n".join({"one", "two", "three", "four", "five", "six"}))' > out`,
			envA: []string{"PYTHONHASHSEED=1"}, envB: []string{"PYTHONHASHSEED=2"}, want: HashSeed,
		},
		{
			name: "JSON of a set", tools: python, a: `python3 -c 'import json; print(json.dumps({k: 1 for k in {"one", "two", "three", "four"}}))' > out`,
			envA: []string{"PYTHONHASHSEED=1"}, envB: []string{"PYTHONHASHSEED=3"}, want: HashSeed,
		},
		{name: "perl's hashes", tools: []string{"perl"}, a: `perl -e '%h = map { $_ => 1 } 1 .. 40; print join(" ", keys %h), "\n"' > out`, want: HashSeed},
		// A UUID that begins with eight decimal digits would look like a number.
		{name: "UUID", a: hostFile("/proc/sys/kernel/random/uuid") + "sed s/^./a/ $f > out", want: Random},
		{name: "salt", tools: []string{"od"}, a: "echo salt $(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n') > out", want: Random},
		{name: "files as they are read", a: "touch b.c a.c c.c; printf '%s\\n' b.c a.c c.c > out", b: "touch b.c a.c c.c; ls -1 *.c > out", want: MemberOrder},
		{
			name: "sorted by a locale", tools: []string{"sort"}, a: "printf 'beta\\nAlpha\\ngamma\\nDelta\\n' | sort > out",
			b: "printf 'beta\\nAlpha\\ngamma\\nDelta\\n' | sort -f > out", want: Locale,
		}, // as the locales of most languages do
		{
			name: "jobs at once", a: "(echo job one has ended; echo job two has ended) > out", b: "(sleep 0.05; echo job one has ended) > out & echo job two has ended > first; wait; cat out >> first; mv first out",
			want: Parallel,
		},
		{name: "uptime", a: hostFile("/proc/uptime") + "echo up $(cut -d' ' -f1 $f) > out", b: "sleep 0.02; echo up $(cut -d' ' -f1 /proc/uptime) > out", want: Uptime},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			scriptB := row.b
			if scriptB == "" {
				scriptB = row.a
			}
			var k Known
			if row.facts != nil {
				k = Known{&Facts{}, &Facts{}}
				row.facts(k.A, k.B)
			}
			a, b := runScript(t, row.a, row.tools, row.envA...), runScript(t, scriptB, row.tools, row.envB...)
			ds := blobs(t, "out", a, b, k)
			if !slices.ContainsFunc(ds, func(d Difference) bool { return d.Cause == row.want }) {
				t.Errorf("got %+v of %q and %q, want %q", ds, a, b, row.want)
			}
			for _, d := range ds {
				if d.Cause != Unknown && d.Fix == "" {
					t.Errorf("no fix for %q", d.Cause)
				}
				if d.Cause != row.want && d.Cause != Unknown && !strings.HasPrefix(row.name, "variable") {
					t.Errorf("%q is named as well", d.Cause)
				}
			}
		})
	}
}
