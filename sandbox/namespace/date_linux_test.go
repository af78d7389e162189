// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
)

// datesPython creates files in /tmp and prints for each way of querying them a name and the difference of their time to
// the clock, in seconds.
const datesPython = `
import os, time
begin = int(time.time()) - 1 # files of a frozen clock are a second old
def since(name, t):
    now = int(time.time())
    print(name, 0 if begin <= int(t) <= now else int(t) - now)
def say(name, st): since(name, st.st_mtime)
os.chdir("/tmp")
os.mkdir("dir")
open("dir/file", "w").write("x")
os.symlink("file", "dir/link")
os.symlink("nowhere", "dangling")
fd = os.open("open", os.O_CREAT | os.O_RDWR)
gone = os.open("gone", os.O_CREAT | os.O_RDWR)
os.unlink("gone")
d = os.open("dir", os.O_RDONLY)
now = int(time.time())
say("directory", os.stat("dir"))
say("file", os.stat("dir/file"))
say("through-link", os.stat("dir/link"))
say("link", os.lstat("dir/link"))
say("dangling", os.lstat("dangling"))
say("descriptor", os.fstat(fd))
say("removed", os.fstat(gone))
say("beside-descriptor", os.stat("file", dir_fd=d))
say("own-descriptor", os.stat("/proc/self/fd/%d" % fd))
say("own-directory", os.stat("/proc/self/cwd/dir/file"))
os.utime("dir/file", (now, now))
say("set-now", os.stat("dir/file"))
since("change", os.stat("dir/file").st_ctime)
since("change-of-descriptor", os.fstat(fd).st_ctime)
since("change-of-link", os.lstat("dangling").st_ctime)
print("change-of-input", int(os.stat("/usr/bin/env").st_ctime - os.stat("/usr/bin/env").st_mtime))
me = os.stat("dir/file")
print("owner", me.st_uid - os.getuid() + me.st_gid - os.getgid() + os.stat("/usr/bin/env").st_uid - 65534)
def fails(name, path):
    try:
        os.stat(path)
        print(name, 99)
    except OSError:
        print(name, 0)
fails("no-directory", "dir/file/")
fails("missing", "dir/missing")
os.chmod("dir", 0)
fails("forbidden", "dir/file")
os.chmod("dir", 0o755)
time.sleep(0.01)
open("younger", "w").write("x")
os.utime("dir/link", (5, 5))
print("set", int(os.stat("dir/file").st_mtime) - 5)
print("order", int(os.stat("younger").st_mtime_ns >= os.fstat(fd).st_mtime_ns) - 1)
print("input", int(os.stat("/usr/bin/env").st_mtime) // (now + 10**9))
`

// TestFilesHaveTheTimeOfTheRun: every query of a file that the program made returns a time by the run's clock; times
// that the program set stay.
func TestFilesHaveTheTimeOfTheRun(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionClockOffset, sandbox.ConditionFrozenClock)
	if _, err := exec.LookPath("/usr/bin/python3"); err != nil {
		sandboxtest.Unavailable(t, "tools", "there is no /usr/bin/python3")
	}
	for name, own := range map[string]sandbox.Conditions{
		"usual": {}, "shifted": {ClockOffset: 400 * 24 * time.Hour}, "held": {FrozenClock: 1_000_000_000 + 7},
	} {
		c := clocked{name: name, args: []string{"/usr/bin/python3", "-c", datesPython}}
		said := 0
		for line := range strings.Lines(c.prints(t, b, t.TempDir(), own)) {
			var what string
			var off int
			if _, err := fmt.Sscan(line, &what, &off); err != nil {
				t.Fatalf("%s: %q: %v", name, line, err)
			}
			if said++; name == "usual" && what == "change-of-input" {
				continue // it has the host's time
			}
			expect.That(t, off == 0, "%s: %s is %d seconds from the clock", name, what, off)
		}
		expect.That(t, said == 22, "%s: %d lines", name, said)
	}
}

// TestHeldFilesAreOfOneSecond: files have the same times, to the second, in every run with a frozen clock, and tools
// that compare times see no future.
func TestHeldFilesAreOfOneSecond(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionFrozenClock)
	script := `cd /tmp && echo x > first && stat -c %.9Y first && date +%s.%N && echo x > member && tar --format=ustar -cf - member | od -An -tx1 && printf 'out: member\n\tcp member out\n' > Makefile && make -s 2>&1 && make -q && touch -d '2 seconds ago' old && for i in 1 2 3 4 5 6 7 8 9 10 11 12 13; do sleep 0.09; done && echo x > later && ls -l --full-time old member later | cut -d. -f1`
	if _, err := exec.LookPath("make"); err != nil {
		sandboxtest.Unavailable(t, "tools", "there is no make")
	}
	c := clocked{name: "tar", args: []string{"/bin/sh", "-c", script}}
	own := sandbox.Conditions{FrozenClock: 1_100_000_000}
	// What follows the first two lines.
	prints := func() string {
		file, rest, _ := strings.Cut(c.prints(t, b, t.TempDir(), own), "\n")
		clock, rest, _ := strings.Cut(rest, "\n")
		expect.That(t, file <= clock, "a file is of the future: %s by a clock of %s", file, clock)
		return rest
	}
	first := prints()
	time.Sleep(1100 * time.Millisecond) // so that the host's second is another
	if second := prints(); first != second || strings.Contains(first, "skew") {
		t.Errorf("got\n%s\nand then\n%s", first, second)
	}
	if n := strings.Count(first, " 11:33:19"); n != 2 { // in UTC, as nothing says otherwise
		t.Errorf("%d of 2 files, a second apart, are of the second before the clock begins:\n%s", n, first)
	}
	if usual := c.prints(t, b, t.TempDir(), sandbox.Conditions{}); usual == first {
		t.Error("a usual run has the held time as well")
	}
}
