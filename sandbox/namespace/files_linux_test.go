// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
)

// TestDirectoriesListInAnotherOrder: with an output order, directories list the same names of the run in another order,
// however many there are, and everything else as usual. Positions in a directory stay valid.
func TestDirectoriesListInAnotherOrder(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionFiles)
	list := func(script string, order int) []string {
		t.Helper()
		r := sandboxtest.Run{Script: script, Spec: func(s *sandbox.Spec) { s.Conditions.OutputOrder = order }}
		if r.Do(t, b); r.Result.ExitCode != 0 {
			t.Fatalf("exit code %d: %s", r.Result.ExitCode, r.Stderr)
		}
		return strings.Fields(r.Stdout)
	}
	few := "cd /tmp && mkdir made && cd made && touch a b c && ls -aU"
	for order, want := range []string{"", ". .. a b c", ". .. b c a", ". .. c a b", ". .. a b c"} {
		usual := list(few, 0)
		if slices.Reverse(usual[2:]); order > 0 && usual[2] == "c" { // an older kernel lists the oldest first
			want = strings.NewReplacer("a", "c", "c", "a").Replace(want)
		}
		if got := strings.Join(list(few, order), " "); order > 0 && got != want {
			t.Errorf("order %d: got %s, want %s", order, got, want)
		}
	}
	pair := "cd /tmp && mkdir made && cd made && touch a b && ls -U"
	if usual, other := list(pair, 0), list(pair, 2); slices.Equal(usual, other) {
		t.Errorf("two entries in order 2: got %q, as usual", other)
	}
	for what, c := range map[string]struct {
		script string
		differ bool
	}{
		"many": {"mkdir /tmp/made && cd /tmp/made && i=0 && while [ $i -lt 3000 ]; do : >a-rather-long-name-$i; i=$((i+1)); done; ls -U", true},
		"host": {"ls -U /usr/bin /usr/lib; ls -d /proc/self", false},
		"gone": {"mkdir -p /tmp/a/b/c && touch /tmp/a/1 /tmp/a/2 /tmp/a/b/3 && rm -r /tmp/a && ls /tmp", false},
	} {
		usual, other := list(c.script, 0), list(c.script, 1)
		expect.That(t, slices.Equal(usual, other) != c.differ,
			"%s: the order differs: %t, want %t", what, !c.differ, c.differ)
		slices.Sort(usual)
		if slices.Sort(other); !slices.Equal(usual, other) {
			t.Errorf("%s: got %d other names than the usual %d", what, len(other), len(usual))
		}
	}
}

// TestListingFailsAsUsual: under an output order, calls that list directories fail as they do without one.
func TestListingFailsAsUsual(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionFiles)
	const script = `import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
number = 217 if os.uname().machine == "x86_64" else 61 # getdents64
def list(fd, at, size): print(libc.syscall(ctypes.c_long(number), fd, at, size), ctypes.get_errno())
os.mkdir("/tmp/d")
open("/tmp/d/f", "w").close()
d, f = os.open("/tmp/d", os.O_RDONLY), os.open("/tmp/d/f", os.O_RDONLY)
b = ctypes.create_string_buffer(1000)
for args in (99, b, 1000), (-1, b, 1000), (f, b, 1000), (os.pipe()[0], b, 1000), (d, b, 3), (d, b, -1), (d, None, 1000): list(*args)
os.lseek(d, 0, os.SEEK_SET)
list(d, b, 1000)
list(d, b, 1000)
os.unlink("/tmp/d/f")
`
	sandboxtest.Tool(t, "python3")
	var said []string
	for order := range 2 {
		r := sandboxtest.Run{Spec: func(s *sandbox.Spec) {
			s.Args, s.Conditions.OutputOrder = []string{"/usr/bin/python3", "-c", script}, order
		}}
		r.Do(t, b)
		said = append(said, fmt.Sprint(r.Result.ExitCode, " ", r.Stdout, r.Stderr))
	}
	expect.That(t, said[0] == said[1] && strings.HasPrefix(said[0], "0 "), "got\n%s\nwant\n%s", said[1], said[0])
}

// TestOthersOwnInputs: files of others seem to belong to another user and group, and those of the run do not.
func TestOthersOwnInputs(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionFiles)
	const script = "touch /tmp/made && stat -c '%u:%g' /usr /usr/bin/env /tmp/made && find /usr/bin/env -printf '%U:%G\\n' && stat -c %Y /usr/bin/env"
	say := func(c sandbox.Conditions) []string {
		r := sandboxtest.Run{Script: script, Spec: func(s *sandbox.Spec) { s.Conditions = c }}
		if r.Do(t, b); r.Result.ExitCode != 0 {
			t.Fatalf("exit code %d: %s", r.Result.ExitCode, r.Stderr)
		}
		return strings.Fields(r.Stdout)
	}
	usual, other := say(sandbox.Conditions{}), say(sandbox.Conditions{InputOwner: 4711})
	expect.Slices(t, other, []string{"4711:4711", "4711:4711", usual[2], "4711:4711", usual[4]}, "usually %q", usual)
}
