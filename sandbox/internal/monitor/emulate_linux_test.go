// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// answers skips the test on hosts that cannot replace clocks and random numbers.
func answers(t *testing.T) {
	t.Helper()
	if err := CanAnswer(); err != nil {
		sandboxtest.Unavailable(t, "monitor", err)
	}
}

// TestForeignCodeIsNotOverwritten: if the vDSO is not that of this kernel, it stays as it is, the program fails to
// start, and Err returns why.
func TestForeignCodeIsNotOverwritten(t *testing.T) {
	answers(t)
	usual := stubs
	defer func() { stubs = usual }()
	for _, c := range []struct {
		name, out, broken string
		change            func(*stub)
	}{
		{"its own", "begin: \n", "", func(*stub) {}},
		{"foreign", "begin: EPERM\n", `process "exe": unexpected vDSO contents`, func(s *stub) { s.before = make([]byte, len(s.before)) }},
		{"elsewhere", "begin: EPERM\n", `process "exe": unexpected vDSO contents`, func(s *stub) { s.offset += 1 << 40 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			all, err := usual()
			if err != nil || len(all) == 0 {
				t.Fatal(all, err)
			}
			all = slices.Clone(all)
			for i := range all {
				c.change(&all[i])
			}
			stubs = func() ([]stub, error) { return all, nil }
			p := start(t, "plain", "begin")
			p.view.Conditions = sandbox.Conditions{ClockOffset: time.Hour, RandomSeed: 1}
			r := Start(p.listener, p.view)
			p.proceed(t)
			expect.Equal(t, p.end(t), c.out)
			got := ""
			if err := r.Err(); err != nil {
				got = err.Error()
			}
			expect.Equal(t, got, c.broken)
		})
	}
}

// TestStubsAreFound: in the vDSO of this kernel, and not in damaged ones.
func TestStubsAreFound(t *testing.T) {
	answers(t)
	aux, err := auxiliary("self")
	if err != nil || aux[auxVDSO] == 0 {
		sandboxtest.Unavailable(t, "monitor", fmt.Sprint("this kernel has no vDSO: ", err))
	}
	f, err := os.Open("/proc/self/mem")
	must.Succeed(t, err)
	defer f.Close()
	image := memory(f.Fd()).image(aux[auxVDSO])
	there := 0
	for _, name := range []string{"clock_gettime", "gettimeofday", "time", "getrandom"} {
		if bytes.Contains(image, []byte("\x00__vdso_"+name+"\x00")) {
			there++
		}
	}
	found, err := findStubs(image)
	must.Be(t, err == nil && len(found) == there, "got %d of %d, %v", len(found), there, err)
	for _, s := range found {
		expect.That(t, len(s.after) == len(s.before) && !bytes.Equal(s.after, s.before),
			"%x becomes %x", s.before, s.after)
	}
	unnamed := bytes.ReplaceAll(image, []byte("__vdso_clock_gettime"), []byte("__vdso_clock_gotten_"))
	far := slices.Clone(image)
	i := bytes.Index(far, binary.LittleEndian.AppendUint64(nil, found[0].offset)) // a symbol's value
	binary.LittleEndian.PutUint64(far[i:], 1<<63)
	for name, b := range map[string][]byte{"empty": nil, "text": []byte("no program"), "cut": image[:100], "unnamed": unnamed, "far": far} {
		if got, err := findStubs(b); err == nil {
			t.Errorf("%s: got %d stubs", name, len(got))
		}
	}
}

// TestFrozenClock: readings, sleeps and waits advance it.
func TestFrozenClock(t *testing.T) {
	c := newClock(&sandbox.Conditions{FrozenClock: 100})
	read := func(want time.Duration) {
		t.Helper()
		got, err := c.read(unix.CLOCK_REALTIME)
		if since := got.Sub(time.Unix(100, 0)); err != nil || since != want {
			t.Errorf("got %v, %v; want %v", since, err, want)
		}
	}
	left := func(thread uint32, at time.Duration, want bool) {
		t.Helper()
		d, err := c.remaining(thread, unix.CLOCK_REALTIME, time.Unix(100, 0).Add(at))
		expect.That(t, err == nil && (d > 0) == want, "thread %d has %v left until %v, %v", thread, d, at, err)
	}
	read(0)
	read(tick)
	c.advance(time.Second)
	read(time.Second + 2*tick)
	left(1, 500*time.Millisecond, false) // it was then
	read(time.Second + 3*tick)
	left(1, time.Hour, true)
	left(2, time.Second+5*tick, true)
	read(time.Second + 4*tick) // others do not wait for it
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		d, err := c.remaining(2, unix.CLOCK_REALTIME, time.Unix(101, 6e6))
		if err != nil || time.Now().After(deadline) {
			t.Fatal("the wait does not end", err)
		}
		if d <= 0 {
			break
		}
	}
	read(1006 * time.Millisecond)
	expect.That(t, len(c.waits) == 1, "%d threads wait, want 1", len(c.waits))
	for thread := range uint32(2 * maxWaits) {
		left(thread, time.Hour, true)
	}
	expect.That(t, len(c.waits) <= maxWaits, "%d waits are remembered", len(c.waits))
}

// TestTimespecMatchesTheKernel: what the kernel rejects is rejected, and late times do not overflow.
func TestTimespecMatchesTheKernel(t *testing.T) {
	f := must.Get(os.CreateTemp(t.TempDir(), ""))(t)
	defer f.Close()
	for _, c := range []struct {
		sec, nsec int64
		want      time.Time
	}{
		{0, 0, time.Unix(0, 0)},
		{5, 999_999_999, time.Unix(5, 999_999_999)},
		{1<<63 - 1, 0, time.Unix(maxSeconds, 0)},
		{-1, 0, time.Time{}},
		{1, -1, time.Time{}},
		{1, 1_000_000_000, time.Time{}},
	} {
		b := binary.NativeEndian.AppendUint64(binary.NativeEndian.AppendUint64(nil, uint64(c.sec)), uint64(c.nsec))
		must.Get(f.WriteAt(b, 0))(t)
		if got, ok := memory(f.Fd()).timespec(0); !got.Equal(c.want) || ok == c.want.IsZero() {
			t.Errorf("%d.%d: got %v, %t", c.sec, c.nsec, got, ok)
		}
	}
	if _, ok := memory(f.Fd()).timespec(8); ok {
		t.Error("timespec accepted half of a time")
	}
}

// TestStreamsAreOfPrograms: a program's numbers depend on its arguments and on earlier programs with the same, not on
// what others take in between; a forked child gets other numbers.
func TestStreamsAreOfPrograms(t *testing.T) {
	take := func(s *stream) string {
		b := make([]byte, 8)
		_, _ = s.Read(b)
		return string(b)
	}
	self := uint32(os.Getpid())
	_, parent := lineage(self)
	history := func(seed uint64, others int) []string {
		r := newRandom(&sandbox.Conditions{RandomSeed: seed})
		first := r.begin(self)
		for range others {
			take(r.of(parent)) // a process that did not start here
		}
		got := []string{take(first), take(r.begin(self)), take(r.of(self))}
		delete(r.streams, self)
		r.streams[parent] = first
		return append(got, take(r.of(self)), take(first))
	}
	got := history(1, 0)
	if again := history(1, 3); !slices.Equal(got, again) {
		t.Errorf("got %x and then %x", got, again)
	}
	if other := history(2, 0); slices.ContainsFunc(other, func(s string) bool { return slices.Contains(got, s) }) {
		t.Errorf("two seeds give %x and %x", got, other)
	}
	slices.Sort(got)
	expect.That(t, len(slices.Compact(got)) == 5, "got the same twice: %x", got)
}

// TestStreamsAreBounded: streams of dead processes are removed.
func TestStreamsAreBounded(t *testing.T) {
	r := newRandom(&sandbox.Conditions{RandomSeed: 1})
	const none = 1 << 30 // above any process ID
	for i := range uint32(20 * fewStreams) {
		r.keep(none+i, r.derive("program", nil, 0))
		must.Be(t, len(r.streams) <= 2*fewStreams, "%d streams are kept", len(r.streams))
	}
}

// TestTimersEndWithTheMonitor: nothing is answered after the end.
func TestTimersEndWithTheMonitor(t *testing.T) {
	var l delayedAnswers
	answered := make(chan uint64, 2)
	l.after(1, time.Millisecond, func() { answered <- 1 })
	expect.Equal(t, <-answered, 1)
	l.after(2, time.Hour, func() { answered <- 2 })
	l.end()
	l.after(3, 0, func() { answered <- 3 })
	expect.That(t, len(answered) == 0 && len(l.timers) == 1 && !l.timers[2].Stop(),
		"%d answers and %d timers after the end", len(answered), len(l.timers))
}

// TestFrozenClockStaysInItsSecond: 100,000 readings stay in one second; a program that polls for the next one ends.
func TestFrozenClockStaysInItsSecond(t *testing.T) {
	c := newClock(&sandbox.Conditions{FrozenClock: 1_000_000_000})
	last := time.Time{}
	for n := range manyReadings {
		now := must.Get(c.read(unix.CLOCK_REALTIME))(t)
		must.Be(t, now.Unix() == 1_000_000_000 && now.After(last), "reading %d: %v after %v", n, now, last)
		last = now
	}
	for range 1000 {
		var err error
		last, err = c.read(unix.CLOCK_REALTIME)
		must.Succeed(t, err)
	}
	expect.That(t, last.Unix() != 1_000_000_000, "a program that waits for the next second never ends")
}

// A process may be killed between the reading of one map and of the other: the next one shows the other.
func TestMapsOfIDsAreReadUntilThereAreSome(t *testing.T) {
	w := &session{users: idMap{{0, 0, 1}}}
	if _, groups := w.idMaps(uint32(os.Getpid())); len(groups) == 0 {
		t.Error("every group is unknown")
	}
}
