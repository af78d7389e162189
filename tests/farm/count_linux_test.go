// SPDX-License-Identifier: Apache-2.0

package farm_test

import (
	"bufio"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestEachActionIsAnsweredOnce checks that each of many small actions is executed once, and that its client gets one
// response with its own output.
func TestEachActionIsAnsweredOnce(t *testing.T) {
	const actions, clients = 1000, 50
	f := newFarm(t)
	c := dial(t, f.head.Addr)
	for _, name := range []string{"a", "b", "c"} {
		f.join(t, name, 1)
	}
	for _, w := range f.workers {
		w.awaitJoin(t, c)
	}
	before := map[string]int{}
	for _, w := range f.workers {
		before[w.name] = w.executed(t)
	}

	numbers := make(chan int)
	var mu sync.Mutex
	by := map[string]int{} // actions by the worker that answered
	var asking sync.WaitGroup
	for range clients {
		asking.Go(func() {
			for n := range numbers {
				worker, err := answered(t, c, n)
				expect.Error(t, err, nil, "action %d", n)
				mu.Lock()
				by[worker]++
				mu.Unlock()
			}
		})
	}
	for n := range actions {
		numbers <- n
	}
	close(numbers)
	asking.Wait()

	sum := 0
	for _, w := range f.workers {
		n := w.executed(t) - before[w.name]
		expect.That(t, n != 0, "worker %s executed nothing", w.name)
		expect.Equal(t, n, by[w.name], "worker %s executed", w.name)
		sum += n
	}
	expect.That(t, sum == actions, "%d actions were executed, want %d: %v", sum, actions, by)
	t.Logf("%d actions by worker: %v", actions, by)
}

// answered executes action n, checks its response and returns its worker.
func answered(t *testing.T, c *client, n int) (string, error) {
	action, err := c.put(t.Context(), fmt.Sprintf("echo %d", n), "")
	if err != nil {
		return "", err
	}
	answer, err := c.execute(t.Context(), action, nil)
	if err != nil {
		return "", err
	}
	r := answer.GetResult()
	if answer.GetStatus().GetCode() != 0 || answer.CachedResult || r.GetExitCode() != 0 {
		return "", fmt.Errorf("got %v, want an uncached success", answer)
	}
	want := cas.SHA256.Sum([]byte(fmt.Sprintln(n)))
	if got, err := cas.FromProto(cas.SHA256, r.GetStdoutDigest()); err != nil || got != want {
		return "", fmt.Errorf("stdout is %v, %v, want %v", got, err, want)
	}
	return workerOf(r), nil
}

// executed returns the number of actions that a worker has executed since its start.
func (w *farmWorker) executed(t *testing.T) int {
	t.Helper()
	r, err := http.Get("http://" + w.machine.address + metricsPort + "/metrics")
	must.Succeed(t, err)
	defer r.Body.Close()
	total := 0
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		if sample, ok := strings.CutPrefix(lines.Text(), "cloister_actions_total{"); ok {
			var n float64
			if _, err := fmt.Sscanf(sample[strings.LastIndexByte(sample, ' ')+1:], "%g", &n); err != nil {
				t.Fatalf("%q: %v", lines.Text(), err)
			}
			total += int(n)
		}
	}
	return total
}
