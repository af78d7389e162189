// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// A stepper is an Executor whose runs end one at a time, on request.
type stepper struct{ end, begun chan struct{} }

func (s stepper) Execute(ctx context.Context, _ *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
	s.begun <- struct{}{}
	select {
	case <-s.end:
		return &worker.Outcome{}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// numbered returns the i-th of many actions, which belong to 50 builds.
func numbered(i int) queue.Request {
	var text [8]byte
	binary.LittleEndian.PutUint64(text[:], uint64(i))
	return queue.Request{Task: worker.Task{Action: cas.SHA256.Sum(text[:]), Invocation: fmt.Sprint(i % 50)}}
}

// BenchmarkStep submits an action and runs one of those waiting.
func BenchmarkStep(b *testing.B) {
	for _, waiting := range []int{0, 100_000} {
		b.Run(fmt.Sprint(waiting, " waiting"), func(b *testing.B) {
			g := stepper{make(chan struct{}), make(chan struct{}, 1)}
			q, err := queue.New(queue.Config{Executor: g, Slots: 1, MaxLive: 1 << 30})
			must.Succeed(b, err)
			defer q.Close()
			n := 0
			submit := func() {
				if _, err := q.Submit(numbered(n)); err != nil {
					b.Fatal(err)
				}
				n++
			}
			for range waiting + 1 {
				submit()
			}
			<-g.begun
			for b.Loop() {
				submit()
				g.end <- struct{}{}
				<-g.begun
			}
		})
	}
}

// BenchmarkSubmit submits actions that do not run.
func BenchmarkSubmit(b *testing.B) {
	g := stepper{make(chan struct{}), make(chan struct{}, 1)}
	q, err := queue.New(queue.Config{Executor: g, Slots: 1, MaxLive: 1 << 30})
	must.Succeed(b, err)
	defer q.Close()
	n := 0
	for b.Loop() {
		if _, err := q.Submit(numbered(n)); err != nil {
			b.Fatal(err)
		}
		n++
	}
}

// BenchmarkLeave lets a tenth of the workers leave while all slots run and as many actions wait.
func BenchmarkLeave(b *testing.B) {
	const slots = 64
	for _, workers := range []int{250, 500, 1000} {
		b.Run(fmt.Sprint(workers, " workers"), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				q, err := queue.New(queue.Config{Head: true, MaxLive: 1 << 30})
				must.Succeed(b, err)
				for i := range 2 * slots * workers {
					must.Get(q.Submit(numbered(i)))(b)
				}
				lost := make([]*queue.Slot, slots*workers)
				for i := range lost {
					o := queue.Offer{Worker: fmt.Sprint(i / slots), Slot: fmt.Sprint(i % slots)}
					lost[i] = must.Get(q.Join(o))(b)
					must.Get(lost[i].Take(b.Context()))(b)
				}
				lost = lost[:len(lost)/10]
				b.StartTimer()
				for _, s := range lost {
					s.Leave("benchmark")
				}
				b.StopTimer()
				q.Close()
				b.StartTimer()
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*slots*workers/10), "us/slot")
		})
	}
}

// BenchmarkFull submits actions to a full queue of abandoned ones, as a client does that comes back after its connection
// broke.
func BenchmarkFull(b *testing.B) {
	for _, n := range []int{25_000, 50_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				q, err := queue.New(queue.Config{Head: true, MaxLive: n, MaxRetained: 10})
				must.Succeed(b, err)
				for i := range n {
					must.Get(q.Submit(numbered(i)))(b).Follow()(false)
				}
				b.StartTimer()
				for i := range n {
					must.Get(q.Submit(numbered(n + i)))(b)
				}
				b.StopTimer()
				q.Close()
				b.StartTimer()
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*n), "us/action")
		})
	}
}

// BenchmarkYield lets the clients of all running actions leave while others wait for the slots.
func BenchmarkYield(b *testing.B) {
	for _, n := range []int{2_000, 4_000, 8_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				q, err := queue.New(queue.Config{Head: true, MaxLive: 1 << 30, CancelGrace: time.Nanosecond})
				must.Succeed(b, err)
				var leave []func(bool)
				var runs []*queue.Run
				for i := range n {
					slot := must.Get(q.Join(queue.Offer{Worker: "w", Slot: fmt.Sprint(i)}))(b)
					leave = append(leave, must.Get(q.Submit(numbered(i)))(b).Follow())
					runs = append(runs, must.Get(slot.Take(b.Context()))(b))
				}
				for i := range n {
					must.Get(q.Submit(numbered(n + i)))(b)
				}
				b.StartTimer()
				for _, l := range leave {
					l(false)
				}
				for _, r := range runs {
					<-r.Cancelled()
				}
				b.StopTimer()
				q.Close()
				b.StartTimer()
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*n), "us/run")
		})
	}
}

// BenchmarkDemands lists the demands of actions that all differ in them, half of which wait for an image.
func BenchmarkDemands(b *testing.B) {
	for _, n := range []int{2_000, 8_000, 32_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			q, err := queue.New(queue.Config{Head: true, MaxLive: 1 << 30})
			must.Succeed(b, err)
			defer q.Close()
			var prepared sync.WaitGroup
			for i := range n {
				r := numbered(i)
				r.Task.Instance = fmt.Sprint(i / 1000) // the limit is 1000 demands per instance
				r.Demands = []worker.Property{{Name: "kind", Value: fmt.Sprint(i)}}
				if i%2 == 0 {
					prepared.Add(1)
					r.Prepare = func(_ context.Context, r *queue.Request) (*worker.Outcome, error) {
						r.Pull = func(ctx context.Context) error {
							prepared.Done()
							<-ctx.Done()
							return ctx.Err()
						}
						return nil, nil
					}
				}
				must.Get(q.Submit(r))(b)
			}
			prepared.Wait()
			for b.Loop() {
				if got := len(q.Demands()); got != n {
					b.Fatalf("got %d demands, want %d", got, n)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*n), "us/demand")
		})
	}
}
