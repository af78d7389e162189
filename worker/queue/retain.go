// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"fmt"
	"slices"
	"time"

	"github.com/cloister-build/cloister/worker"
	"google.golang.org/protobuf/proto"
)

// MaxBlobs limits the absent blobs kept of a Fault. At about 100 bytes each, one message of 4 MiB holds no more. A
// client uploads the reported blobs and learns of the others when it retries.
const MaxBlobs = 40_000

// The memory of completed operations is estimated from values that are cheap to obtain. A decoded result takes 1.7 to
// 3.1 times its encoded size from ten files up, measured with Go 1.26 on linux/amd64.
const (
	operationBytes = 1 << 10 // one operation with its name, list entries and a small result
	blobBytes      = 100     // a digest with its hash
	decoded        = 3       // times the encoded size
)

// An end is the result of a job. It has neither an outcome nor a fault if the job is still to run.
type end struct {
	outcome *worker.Outcome
	fault   *worker.Fault
	bytes   int64             // estimated memory of either
	notify  func(Info, State) // returned by Config.Ended; nil if not called yet
}

// endOf returns the part worth keeping of what Prepare or the Executor returned.
func endOf(out *worker.Outcome, err error) end {
	switch {
	case err != nil:
		f := asFault(err)
		if n := len(f.Blobs); n > MaxBlobs {
			// Keep only the error's text, since the error may hold the whole list.
			f = &worker.Fault{
				Kind:  f.Kind,
				Err:   fmt.Errorf("%d blobs are absent: %v", n, f.Err),
				Blobs: slices.Clone(f.Blobs[:MaxBlobs]),
			}
		}
		e := end{fault: f, bytes: blobBytes * int64(len(f.Blobs))}
		if f.Err != nil {
			e.bytes += int64(len(f.Error()))
		}
		return e
	case out != nil:
		return end{outcome: out, bytes: decoded*int64(proto.Size(out.Result)) + int64(len(out.Message))}
	}
	return end{}
}

// endOf is like the function endOf for a task, but also calls Config.Ended, which may take a while.
func (q *Queue) endOf(t *worker.Task, out *worker.Outcome, err error) end {
	e := endOf(out, err)
	if q.cfg.Ended != nil && (e.outcome != nil || e.fault != nil) {
		e.notify = q.cfg.Ended(t, e.outcome, e.fault)
	}
	return e
}

// retain keeps a completed operation for queries. If there are too many, operations without a run go first: their
// clients can ask again at the price of a lookup, and a storm of them must not cost others their results (rule 92). The
// newest operation whose action ran stays, however large.
func (q *Queue) retain(o *Operation, ran bool) {
	if ran {
		q.executed = append(q.executed, o)
	} else {
		q.answered = append(q.answered, o)
	}
	q.retainedBytes += o.bytes
	for n := len(q.answered) + len(q.executed); n > 1; n-- {
		switch {
		case n <= q.cfg.MaxRetained && q.retainedBytes <= q.cfg.MaxRetainedBytes:
			return
		case len(q.answered) > 0:
			q.dropOldest(&q.answered)
		default:
			q.dropOldest(&q.executed)
		}
	}
}

// dropOldest removes the first operation of list.
func (q *Queue) dropOldest(list *[]*Operation) {
	q.unlist((*list)[0])
	(*list)[0] = nil // release it to the garbage collector
	*list = (*list)[1:]
}

// unlist makes a completed operation unknown.
func (q *Queue) unlist(o *Operation) {
	delete(q.ops, o.info.Name)
	q.listed.remove(o)
	q.retainedBytes -= o.bytes
}

// dropExpired removes the operations completed more than Config.Retain ago.
func (q *Queue) dropExpired(now time.Time) {
	for _, list := range []*[]*Operation{&q.answered, &q.executed} {
		for len(*list) > 0 && now.Sub((*list)[0].completed) > q.cfg.Retain {
			q.dropOldest(list)
		}
	}
}
