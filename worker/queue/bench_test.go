// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// A gate is an Executor each of whose runs takes one pass.
type gate struct{ passes, begun chan struct{} }

func (g gate) Execute(ctx context.Context, _ *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
	g.begun <- struct{}{}
	select {
	case <-g.passes:
		return &worker.Outcome{}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// numbered is the i-th of many actions, of 50 builds.
func numbered(i int) queue.Request {
	var text [8]byte
	binary.LittleEndian.PutUint64(text[:], uint64(i))
	return queue.Request{Task: worker.Task{Action: cas.SHA256.Sum(text[:]), Invocation: fmt.Sprint(i % 50)}}
}

// BenchmarkTurn submits an action and has one run, of those that wait.
func BenchmarkTurn(b *testing.B) {
	for _, waiting := range []int{0, 100_000} {
		b.Run(fmt.Sprint(waiting, " waiting"), func(b *testing.B) {
			g := gate{make(chan struct{}), make(chan struct{}, 1)}
			q := queue.New(queue.Config{Executor: g, Slots: 1, MaxLive: 1 << 30})
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
				g.passes <- struct{}{}
				<-g.begun
			}
		})
	}
}

// BenchmarkSubmit submits actions that wait.
func BenchmarkSubmit(b *testing.B) {
	g := gate{make(chan struct{}), make(chan struct{}, 1)}
	q := queue.New(queue.Config{Executor: g, Slots: 1, MaxLive: 1 << 30})
	defer q.Close()
	n := 0
	for b.Loop() {
		if _, err := q.Submit(numbered(n)); err != nil {
			b.Fatal(err)
		}
		n++
	}
}
