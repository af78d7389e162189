// SPDX-License-Identifier: Apache-2.0

//go:build unix

package scale

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

var waiting = flag.Int("waiting", 0, "number of waiting actions in the largest of three queues to measure; 0 runs a small one")

// TestQueue runs the steps of Run on a queue alone, without gRPC, in one goroutine: all actions wait; slots execute
// half of them, which end in random order; a tenth of the workers leaves; a new queue takes over. Then slots execute
// the rest. With -waiting it prints the CPU time of each step, which depends less on other processes than its duration.
func TestQueue(t *testing.T) {
	sizes := []int{8000}
	if *waiting > 0 {
		sizes = []int{*waiting / 4, *waiting / 2, *waiting}
	}
	for _, n := range sizes {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			measureQueue(t, Size{Workers: max(4, n/1000), Slots: 64, Actions: n, Builds: max(6, n/5000)})
		})
	}
}

// A queueFarm is a farm whose clients and workers call the queue directly.
type queueFarm struct {
	*farm
	*queue.Queue
	t       *testing.T
	ops     []*queue.Operation // of the actions without a result, in the order of the builds
	done    []bool             // those with a result
	slots   []*queue.Slot
	runs    []*queue.Run // of the slots
	waiting int
}

func measureQueue(t *testing.T, size Size) {
	f := &queueFarm{farm: &farm{cfg: Config{Size: size}, actions: make(map[string]*action)}, t: t}
	f.prepare()
	f.ops, f.done = make([]*queue.Operation, size.Actions), make([]bool, size.Actions)
	f.open()
	before := heap()
	submitted := f.cpu(f.submit)
	memory := (heap() - before) / uint64(size.Actions)
	joined := f.cpu(func() { f.join(size.Workers) })
	half := size.Actions / 2
	ran := f.cpu(func() { f.execute(half) })
	late := excess(f.builds, f.gave)
	lost := max(1, size.Workers/10)
	left := f.cpu(func() { f.leave(lost) })
	f.close(half)
	restarted := f.cpu(func() {
		f.open()
		f.join(size.Workers - lost)
		f.submit()
	})
	f.execute(size.Actions - half)
	f.close(size.Actions)
	each := func(d time.Duration, n int) float64 { return float64(d.Nanoseconds()) / 1000 / float64(n) }
	t.Logf("queue: | %d x %d | %d | %d | %d B | %.1f us | %.1f us | %.1f us | %.1f %%, %.1f %% | %.1f us | %.1f s |",
		size.Workers, size.Slots, size.Actions, size.Builds, memory,
		each(submitted, size.Actions), each(joined, size.Workers*size.Slots), each(ran, half),
		late.percent(late.P50), late.percent(late.P99), each(left, lost*size.Slots), restarted.Seconds())
}

// heap returns the number of bytes in use.
func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// cpu returns the CPU time that the process uses during step, including garbage collection.
func (f *queueFarm) cpu(step func()) time.Duration {
	now := func() time.Duration {
		var u syscall.Rusage
		must.Succeed(f.t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	began := now()
	step()
	return now() - began
}

// open starts a queue without slots and actions.
func (f *queueFarm) open() {
	f.Queue = must.Get(queue.New(queue.Config{Head: true, MaxLive: f.cfg.Actions}))(f.t)
}

// close closes the queue, and checks that n actions have a result.
func (f *queueFarm) close(n int) {
	for i, o := range f.ops {
		f.done[i] = f.done[i] || o.State().Outcome != nil
		if f.done[i] {
			n--
		}
	}
	f.Close()
	clear(f.ops)
	f.Queue, f.slots, f.runs, f.waiting = nil, nil, nil, 0
	expect.Equal(f.t, n, 0, "missing results")
	runtime.GC()
}

// submit submits the actions that have no result.
func (f *queueFarm) submit() {
	n := 0
	for i, b := range f.builds {
		for _, a := range b.actions {
			if n++; f.done[n-1] {
				continue
			}
			digest := must.Get(cas.NewDigest(cas.SHA256, strings.Clone(a.digest.Hash), a.digest.SizeBytes))(f.t) // so that its memory is measured
			task := worker.Task{Action: digest, Invocation: fmt.Sprint("build ", i)}
			o := must.Get(f.Submit(queue.Request{Task: task, Priority: b.priority}))(f.t)
			o.Follow()
			f.ops[n-1] = o
			f.waiting++
		}
	}
}

// join adds the slots of n workers, which run nothing yet.
func (f *queueFarm) join(n int) {
	for i := range n * f.cfg.Slots {
		o := queue.Offer{Worker: fmt.Sprint("w", i/f.cfg.Slots), Slot: fmt.Sprint(i % f.cfg.Slots)}
		f.slots = append(f.slots, must.Get(f.Join(o))(f.t))
	}
}

// leave removes the first n workers. Their actions wait again.
func (f *queueFarm) leave(n int) {
	n *= f.cfg.Slots
	for i, s := range f.slots[:n] {
		s.Leave("lost")
		if f.runs[i] != nil {
			f.waiting++
		}
	}
	f.slots, f.runs = f.slots[n:], f.runs[n:]
}

// execute ends n runs, each of a random slot, which then takes the next action.
func (f *queueFarm) execute(n int) {
	for len(f.runs) < len(f.slots) {
		f.runs = append(f.runs, f.take(f.slots[len(f.runs)]))
	}
	for n > 0 {
		i := rand.IntN(len(f.runs))
		if f.runs[i] == nil {
			continue
		}
		f.runs[i].End(&worker.Outcome{Result: &repb.ActionResult{}}, nil)
		f.runs[i] = f.take(f.slots[i])
		n--
	}
}

// take returns the next run of a slot, or nil if no action waits.
func (f *queueFarm) take(s *queue.Slot) *queue.Run {
	if f.waiting == 0 {
		return nil
	}
	f.waiting--
	r := must.Get(s.Take(f.t.Context()))(f.t)
	a := f.actions[r.Task().Action.Hash()]
	if a.given.Add(1) == 1 {
		f.gave = append(f.gave, assignment{a.build, time.Unix(0, int64(len(f.gave)))}) // counts assignments
	}
	return r
}
