// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"fmt"
	"slices"
	"time"

	"github.com/cloister-build/cloister/worker"
	"google.golang.org/protobuf/proto"
)

// MaxBlobs is how many absent blobs of a Fault are kept. A client can be told of no more in one message
// of 4 MiB, at about 100 bytes each; it uploads whatever is missing when told of any, and is told of the rest if it
// does not.
const MaxBlobs = 40_000

// What completed operations take in memory is estimated from what is cheap to know. A decoded result
// takes 1.7 to 3.1 times its encoded size from ten files up, measured with Go 1.26 on linux/amd64.
const (
	operationBytes = 1 << 10 // one with its name, its place in the lists and a small result
	blobBytes      = 100     // a digest with its hash
	decoded        = 3       // times the encoded size
)

// An end is what became of a job. It has neither an outcome nor a fault if the job is still to run.
type end struct {
	outcome *worker.Outcome
	fault   *worker.Fault
	bytes   int64             // what is kept of either, estimated
	tell    func(Info, State) // of Config.Ended, nil if it is not asked yet
}

// endOf returns the end that is worth keeping of what Prepare or the Executor returned.
func endOf(out *worker.Outcome, err error) end {
	switch {
	case err != nil:
		f := asFault(err)
		if n := len(f.Blobs); n > MaxBlobs {
			// Of the error the text is enough, and what it wraps may hold the whole list.
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

// endOf returns the end of which Config.Ended has been told. It may take a while.
func (q *Queue) endOf(out *worker.Outcome, err error) end {
	e := endOf(out, err)
	if q.cfg.Ended != nil && (e.outcome != nil || e.fault != nil) {
		e.tell = q.cfg.Ended(e.outcome, e.fault)
	}
	return e
}

// keep lets o, which is completed, answer for a while. When there are too many, those go first whose
// actions did not run: their clients ask again at the price of a lookup, and a storm of them must not
// cost the others their results (rule 92). The newest of all stays, however large, if its action ran.
func (q *Queue) keep(o *Operation, ran bool) {
	if ran {
		q.executed = append(q.executed, o)
	} else {
		q.answered = append(q.answered, o)
	}
	q.kept += o.bytes
	for n := len(q.answered) + len(q.executed); n > 1; n-- {
		switch {
		case n <= q.cfg.MaxRetained && q.kept <= q.cfg.MaxRetainedBytes:
			return
		case len(q.answered) > 0:
			q.dropOldest(&q.answered)
		default:
			q.dropOldest(&q.executed)
		}
	}
}

// dropOldest makes the first operation of list unknown.
func (q *Queue) dropOldest(list *[]*Operation) {
	q.unlist((*list)[0])
	(*list)[0] = nil // else the array behind the slice would keep it
	*list = (*list)[1:]
}

// unlist makes o, which is completed, unknown.
func (q *Queue) unlist(o *Operation) {
	delete(q.ops, o.info.Name)
	q.listed.remove(o)
	q.kept -= o.bytes
}

// dropExpired drops the operations that have answered for long enough.
func (q *Queue) dropExpired(now time.Time) {
	for _, list := range []*[]*Operation{&q.answered, &q.executed} {
		for len(*list) > 0 && now.Sub((*list)[0].completed) > q.cfg.Retain {
			q.dropOldest(list)
		}
	}
}
