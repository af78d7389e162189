// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A process is an entry of /proc.
type process struct {
	pid   int
	state string
	name  string
}

// children returns the unreaped children of a process.
func children(t *testing.T, parent int) []process {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	must.Be(t, err == nil && len(stats) != 0, "cannot list the host's processes: %v", err)
	var found []process
	for _, p := range stats {
		text, err := os.ReadFile(p)
		if err != nil {
			continue // it has ended
		}
		before, after, ok := strings.Cut(string(text), " (")
		i := strings.LastIndex(after, ") ")
		must.Be(t, ok && i >= 0, "%s: %q", p, text)
		f := strings.Fields(after[i+2:])
		pid, err := strconv.Atoi(before)
		if err == nil && f[1] == strconv.Itoa(parent) {
			found = append(found, process{pid, f[0], after[:i]})
		}
	}
	return found
}

// slotProcesses returns the living slots of a backend.
func slotProcesses(t *testing.T, b *namespace.Backend) []int {
	t.Helper()
	var pids []int
	for _, p := range children(t, b.Zygote()) {
		// The first thread of an exiting process may be gone before the others.
		threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.pid))
		if p.state != "Z" || len(threads) > 1 {
			pids = append(pids, p.pid)
		}
	}
	return pids
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// TestTemplateKeepsNothing: changes of a run to its root are invisible to the slot's next run, even if the run was
// killed.
func TestTemplateKeepsNothing(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	look := func() string {
		r := sandboxtest.Run{Script: `ls -AlRn --time-style=+%s.%N / --ignore=proc --ignore=usr --ignore=lib --ignore=lib64 --ignore=bin --ignore=alternatives 2>&1 | sed 's/[0-9]*\.[0-9]* / /; s/^total.*//'
cat /etc/* 2>/dev/null; exec 3</etc/passwd; flock -xn 3 && echo free; ls -A /tmp /dev/shm /build`}
		r.Do(t, b)
		return r.Stdout
	}
	numbers := regexp.MustCompile(`[0-9]+:[0-9]+|^[0-9]+ [0-9]+|mnt:\[[0-9]+\]`)
	mounts := func() string {
		r := sandboxtest.Run{Script: "cat /proc/self/mountinfo"}
		r.Do(t, b)
		var lines []string
		for l := range strings.Lines(r.Stdout) {
			lines = append(lines, numbers.ReplaceAllString(l, "N"))
		}
		slices.Sort(lines) // pid 1 mounts /proc while its slot mounts the rest
		return strings.Join(lines, "")
	}
	before, table := look(), mounts()
	must.Be(t, strings.Contains(before, "free\n") && strings.Contains(table, " /tmp "), "got %s\n%s", before, table)
	const leave = `exec 2>/dev/null 3</etc/passwd; flock -x 3
for d in / /etc /dev /dev/shm /tmp /build /proc; do echo x > $d/left; mkdir $d/leftdir; ln -s x $d/leftlink; mkfifo $d/leftpipe; done
for f in /etc/passwd /etc/hosts; do echo x >> $f; touch $f; chmod 777 $f; mv $f $f.left; rm -f $f; done
rm -rf /tmp /dev/shm /etc; mount -t tmpfs left /tmp; umount -l /dev/shm; cd /tmp; `
	for _, end := range []string{"exit 0", "sleep 60 & exit 3", "kill -9 $$", "exec sleep 60"} {
		r := sandboxtest.Run{Script: leave + end, Spec: func(s *sandbox.Spec) { s.Timeout = 500 * time.Millisecond }}
		r.Do(t, b)
		expect.Equal(t, look(), before, "the root after %s", end)
		expect.Equal(t, mounts(), table, "the mount table after %s", end)
	}
	expect.Equal(t, b.Slots(), 1, "slots of the runs")
}

// TestBasesDoNotMix: runs with different bases alternate in one slot and each gets its own.
func TestBasesDoNotMix(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	dir := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "mark"), nil, 0o644))
	const script = `cat /etc/hosts; df -B1 /tmp | tail -n1; test -e /host/mark && echo mark; ls -d /build/* /other 2>/dev/null; cat /proc/self/net/dev | grep -c lo:; exec 2>/dev/null; exec 3<>/dev/tcp/127.0.0.1/9`
	changes := []func(*sandbox.Spec){
		func(s *sandbox.Spec) {},
		func(s *sandbox.Spec) { s.Network.Listen = false },
		func(s *sandbox.Spec) { s.Network = sandbox.Network{} },
		func(s *sandbox.Spec) { s.Temp[0].Bytes = 5 << 20 },
		func(s *sandbox.Spec) { s.Temp = append(s.Temp, sandbox.Temp{Target: "/other", Bytes: 1 << 20}) },
		func(s *sandbox.Spec) { s.Network.Allow = []sandbox.Endpoint{{Host: "name.example", Port: 443}} },
		func(s *sandbox.Spec) { s.Network.Allow = []sandbox.Endpoint{{Host: "other.example", Port: 443}} },
		func(s *sandbox.Spec) { s.Audit = sandbox.AuditOff },
		func(s *sandbox.Spec) {
			s.Inputs = append(s.Inputs, sandbox.Input{Target: "/host", Content: "x", Source: dir})
		},
		func(s *sandbox.Spec) { // a root of its own
			s.Inputs = append(s.Inputs, sandbox.Input{Target: "/other", Content: "x", Source: "out/x"})
			s.Outputs[0].Source = "out/y"
		},
	}
	run := func(i int) string {
		r := sandboxtest.Run{
			Spec: func(s *sandbox.Spec) { s.Args = []string{"/bin/bash", "-c", script}; changes[i](s) },
			Setup: func(t testing.TB, ws *os.Root) {
				must.Succeed(t, errors.Join(ws.Mkdir("out/x", 0o755), ws.Mkdir("out/y", 0o755)))
			},
		}
		r.Do(t, b)
		return r.Stdout
	}
	var alone []string
	for i := range changes {
		alone = append(alone, run(i))
	}
	for _, i := range []int{1, 2, 3, 4, 5, 6} {
		if i > 2 && slices.Contains(alone[:i], alone[i]) {
			t.Errorf("change %d makes no difference:\n%s", i, alone[i])
		}
	}
	// A sequence in which every ordered pair of changes occurs once (de Bruijn, order 2).
	var sequence []int
	for i := range changes {
		sequence = append(sequence, i)
		for j := i + 1; j < len(changes); j++ {
			sequence = append(sequence, i, j)
		}
	}
	previous := -1
	for _, i := range append(sequence, 0) {
		if got := run(i); got != alone[i] {
			t.Fatalf("change %d after %d: got\n%s\nwant\n%s", i, previous, got, alone[i])
		}
		previous = i
	}
	expect.Equal(t, b.Slots(), 1, "slots of the runs")
}

// TestFailedTemplateIsForgotten: a run succeeds once its missing input exists.
func TestFailedTemplateIsForgotten(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	dir := filepath.Join(t.TempDir(), "late")
	r := sandboxtest.Run{Script: "ls /late", Spec: func(s *sandbox.Spec) {
		s.Inputs = append(s.Inputs, sandbox.Input{Target: "/late", Content: "x", Source: dir})
	}}
	for range 2 {
		expect.Message(t, r.Try(t.Context(), t, b), dir)
	}
	must.Succeed(t, os.Mkdir(dir, 0o755))
	r.Do(t, b)
}

// TestTemplateFollowsTheHost: the next run sees an input that was replaced on the host.
func TestTemplateFollowsTheHost(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	dir := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		p := filepath.Join(dir, name)
		must.Succeed(t, errors.Join(os.Mkdir(p, 0o755), os.WriteFile(filepath.Join(p, "file"), []byte(text), 0o644)))
	}
	move := func(from, to string) {
		t.Helper()
		must.Succeed(t, os.Rename(filepath.Join(dir, from), filepath.Join(dir, to)))
	}
	r := sandboxtest.Run{Script: "cat /sdk/file", Spec: func(s *sandbox.Spec) {
		s.Inputs = append(s.Inputs, sandbox.Input{Target: "/sdk", Content: "host", Source: filepath.Join(dir, "sdk")})
	}}
	put("sdk", "old")
	r.Do(t, b)
	put("new", "new")
	move("sdk", "gone")
	move("new", "sdk")
	r.Do(t, b)
	expect.Equal(t, r.Stdout, "new")
}

// TestKilledSlotLosesItsRunAlone: other runs continue, and the next runs get new slots.
func TestKilledSlotLosesItsRunAlone(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	mark := fmt.Sprintf("6%d.5", os.Getpid())
	type end struct {
		r   *sandboxtest.Run
		err error
	}
	ended := make(chan end, 2)
	first := slotProcesses(t, b)
	must.Be(t, len(first) == 1, "got slots %v after one run", first)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 2 {
		go func() {
			r := &sandboxtest.Run{Script: "echo ready; exec sleep " + mark}
			err := r.Try(ctx, t, b)
			ended <- end{r, err}
		}()
	}
	running := func() int { return len(sandboxtest.Running(t, "sleep\x00"+mark)) }
	must.Hold(t, "the runs are there", func() bool { return running() == 2 })
	must.Succeed(t, syscall.Kill(first[0], syscall.SIGKILL))
	lost := <-ended
	if lost.err == nil || !strings.Contains(lost.err.Error(), "it was killed by signal 9 (SIGKILL)") {
		t.Errorf("a run without its slot ended with %+v, %v", lost.r.Result, lost.err)
	}
	expect.Equal(t, b.Lost(), 0, "tries of a run that had begun")
	expect.Equal(t, running(), 1, "runs are alive")
	cancel()
	if other := <-ended; other.err != nil || !other.r.Result.Stopped {
		t.Errorf("the other run: got %+v, %v", other.r.Result, other.err)
	}
	// All of them, while they wait.
	for _, pid := range slotProcesses(t, b) {
		must.Succeed(t, syscall.Kill(pid, syscall.SIGKILL))
	}
	must.Hold(t, "the slots end", func() bool { return len(slotProcesses(t, b)) == 0 })
	r := sandboxtest.Run{Script: "exit 3"}
	for range 3 {
		r.Do(t, b)
		expect.That(t, r.Result.ExitCode == 3, "the next run: got %+v", r.Result)
	}
}

// TestIdleProcessesDie: idle slots and their prepared pid 1 end with the zygote and with the backend.
func TestIdleProcessesDie(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*namespace.Backend) error{
		"zygote": (*namespace.Backend).KillZygote, "backend": (*namespace.Backend).Close,
	} {
		b, _ := backend(t, namespace.Config{})
		var all []int
		if !must.Poll(time.Minute, func() bool {
			all = slotProcesses(t, b)
			for _, slot := range all {
				for _, c := range children(t, slot) {
					all = append(all, c.pid)
				}
			}
			return len(all) == 2 // the slot, and the pid 1 that waits
		}) {
			t.Fatalf("got processes %v, want a slot and a pid 1", all)
		}
		must.Succeed(t, end(b))
		if !must.Poll(time.Minute, func() bool { return !slices.ContainsFunc(all, alive) }) {
			t.Errorf("without the %s these live: %v", name, slices.DeleteFunc(all, func(pid int) bool { return !alive(pid) }))
		}
	}
}

// TestLongCommandLines: command lines that the kernel accepts run, and longer ones fail as the program's error, however
// the plan travels.
func TestLongCommandLines(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	many := func(n, size int) []string {
		list := make([]string, n)
		for i := range list {
			list[i] = fmt.Sprintf("%0*d", size, i)
		}
		return list
	}
	env := func(values []string) []string {
		for i, v := range values {
			values[i] = fmt.Sprintf("V%06d=%s", i, v)
		}
		return append([]string{"PATH=/usr/bin:/bin"}, values...)
	}
	const word = 128<<10 - 1 // the longest that the kernel takes, without its NUL (MAX_ARG_STRLEN)
	for _, c := range []struct {
		name string
		args []string
		env  []string
		code int
	}{
		{"plan that just fits a packet or not", many(1, 59<<10), nil, 0},
		{"longest word", many(1, word), nil, 0},
		{"a longer word", many(1, word+1), nil, 126},
		{"longest variable", nil, env(many(1, word-len("V000000="))), 0},
		{"a longer variable", nil, env(many(1, word-len("V000000=")+1)), 126},
		{"many words", many(100_000, 8), nil, 0},
		{"a megabyte of words", many(10, 100<<10), nil, 0},
		{"a megabyte of variables", nil, env(many(10, 100<<10)), 0},
		{"more than there is room for", many(90, 100<<10), nil, 126},
		{"more variables than there is room for", nil, env(many(90, 100<<10)), 126},
	} {
		r := sandboxtest.Run{Spec: func(s *sandbox.Spec) {
			s.Args = append([]string{"/bin/bash", "-c", `echo $#; [ -z "$V000000" ] || echo ${#V000000}`, "bash"}, c.args...)
			if c.env != nil {
				s.Env = c.env
				slices.Sort(s.Env)
			}
		}}
		r.Do(t, b)
		if r.Result.ExitCode != c.code || c.code == 0 && !strings.HasPrefix(r.Stdout, fmt.Sprintf("%d\n", len(c.args))) {
			t.Errorf("%s: got exit code %d, %q, %s", c.name, r.Result.ExitCode, r.Stdout, r.Stderr)
		}
		expect.That(t, c.code != 126 || r.Stderr == "cloister: /bin/bash: cannot be executed: argument list too long\n",
			"%s: got %q", c.name, r.Stderr)
	}
}

// TestPlansAroundAPacket: plans around the size of a packet arrive complete.
func TestPlansAroundAPacket(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	for n := 62 << 10; n < 66<<10; n += 64 {
		r := sandboxtest.Run{Spec: func(s *sandbox.Spec) {
			s.Args = []string{"/bin/bash", "-c", "echo ${#1}", "bash", strings.Repeat("x", n)}
		}}
		r.Do(t, b)
		if r.Stdout != fmt.Sprintln(n) {
			t.Errorf("a word of %d bytes: got %q, exit code %d, %s", n, r.Stdout, r.Result.ExitCode, r.Stderr)
		}
	}
}

// TestSlotStaysSmall: hundreds of runs, some with long command lines, leave no descriptor behind in a slot and little
// memory.
func TestSlotStaysSmall(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	runs := func(n int) {
		t.Helper()
		for i := range n {
			s := script("true")
			s.Args = []string{"/bin/true"}
			if i%3 == 0 {
				s.Args = append(s.Args, slices.Repeat([]string{strings.Repeat("x", 100<<10)}, 12)...)
			}
			must.Get(b.Run(t.Context(), s, sandbox.Stdio{}))(t)
		}
	}
	runs(20)
	slots := slotProcesses(t, b)
	must.Be(t, len(slots) == 1, "got slots %v", slots)
	state := func() (fds, processes int, resident int64) {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", slots[0]))
		must.Succeed(t, err)
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", slots[0]))
		must.Succeed(t, err)
		for line := range strings.Lines(string(status)) {
			if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				resident, err = strconv.ParseInt(strings.Fields(v)[0], 10, 64)
				must.Succeed(t, err)
			}
		}
		return len(entries), len(children(t, slots[0])), resident << 10
	}
	runs(80)
	// The slot prepares the next pid 1 a moment after the last run.
	must.Hold(t, "a pid 1 waits for the next run", func() bool { _, processes, _ := state(); return processes == 1 })
	fds, _, resident := state()
	runs(250)
	var f, p int
	var now int64
	expect.That(t, must.Poll(time.Minute, func() bool { f, p, now = state(); return f <= fds+1 && p == 1 }),
		"after 250 runs more: %d descriptors and %d processes, before %d and 1", f, p, fds)
	if !racing() && (now > resident+4<<20 || now > 48<<20) {
		t.Errorf("after 250 runs more: resident are %s, before %s", sandbox.Bytes(now), sandbox.Bytes(resident))
	}
	for _, c := range append(children(t, slots[0]), children(t, b.Zygote())...) {
		expect.That(t, c.state != "Z", "%s, %d, is a zombie", c.name, c.pid)
	}
}

// racing reports whether the race detector is built in, which needs memory of its own.
func racing() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// churnVariable makes the test binary a worker that executes runs endlessly, each a program with this mark.
const churnVariable = "CLOISTER_TEST_CHURN"

func churn(mark string) {
	b := namespace.New(namespace.Config{})
	if _, err := b.Probe(timeless{}); err != nil {
		panic(err)
	}
	fmt.Println(b.Zygote())
	for {
		s := &sandbox.Spec{Args: []string{"/bin/sleep", "0.00" + mark}, Dir: "/usr", Inputs: programs(), Limits: sandboxtest.Limits()}
		if _, err := b.Run(timeless{}, s, sandbox.Stdio{}); err != nil {
			panic(err)
		}
	}
}

// TestEverythingDiesWithTheWorker: all processes of a worker end with it, at whatever moment it is killed, even after
// it was unresponsive so that a command waits for it.
func TestEverythingDiesWithTheWorker(t *testing.T) {
	t.Parallel()
	backend(t, namespace.Config{})
	mark := fmt.Sprintf("7%d", os.Getpid())
	for i := range 12 {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), churnVariable+"="+mark)
		stdout, err := cmd.StdoutPipe()
		must.Succeed(t, err)
		must.Succeed(t, cmd.Start())
		line, err := bufio.NewReader(stdout).ReadString('\n')
		zygote := strings.TrimSpace(line)
		must.Be(t, err == nil, "the worker does not start: %q, %v", line, err)
		time.Sleep(time.Duration(i) * 2600 * time.Microsecond)
		if i%2 == 0 {
			must.Succeed(t, cmd.Process.Signal(syscall.SIGSTOP))
			time.Sleep(20 * time.Millisecond)
		}
		must.Succeed(t, cmd.Process.Kill())
		_ = cmd.Wait() // killed, as asked
		left := func() []string { return append(session(t, zygote), sandboxtest.Running(t, "sleep\x000.00"+mark)...) }
		if !must.Poll(time.Minute, func() bool { return len(left()) == 0 }) {
			t.Errorf("after worker %d these live: %v", i, left())
		}
	}
}

// session returns the living processes of a session (proc_pid_stat(5)): the zygote that leads it, its slots and each
// pid 1.
func session(t *testing.T, leader string) []string {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	must.Be(t, err == nil && len(stats) != 0, "cannot list the host's processes: %v", err)
	var found []string
	for _, p := range stats {
		text, err := os.ReadFile(p)
		if err != nil {
			continue // it has ended
		}
		if f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:])); len(f) > 3 && f[3] == leader && f[0] != "Z" {
			found = append(found, string(text))
		}
	}
	return found
}
