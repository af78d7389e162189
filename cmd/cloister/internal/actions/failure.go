// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/printable"
	"google.golang.org/grpc/codes"
)

// A failure is a failed run of an action, from a server's history.
type failure struct {
	entry   *cloisterpb.HistoryEntry
	result  *repb.ActionResult // nil if there is none, or if it is evicted
	lines   []string           // of the message
	evicted bool
}

// failureOf returns the latest run of an action if it failed, or nil. With only it returns the latest failed run, and
// an error if the history has none. It does not read the result.
func failureOf(ctx context.Context, from *client.Server, action cas.Digest, only bool) (*failure, error) {
	e, err := from.LatestRun(ctx, action, only)
	switch {
	case err != nil:
		return nil, err
	case !client.Failed(e) && only:
		return nil, exit.New(exit.Absent, fmt.Errorf("action %s: no failure in the history of %s, instance %q", action, from.Address, from.Instance))
	case !client.Failed(e):
		return nil, nil
	}
	return &failure{entry: e, lines: []string{e.Message}}, nil
}

// read reads the result, if there is one.
func (f *failure) read(ctx context.Context, s cas.Store) error {
	if f.entry.Response == "" {
		return nil
	}
	r := &repb.ExecuteResponse{}
	d, err := cas.ParseDigest(f.entry.Response)
	if err == nil {
		err = cas.ReadProto(ctx, s, d, r)
	}
	if errors.Is(err, cas.ErrNotFound) {
		f.evicted = true
		return nil
	}
	if err != nil {
		return fmt.Errorf("result of the failed action %s: %w", render.Quote(f.entry.Action), err)
	}
	f.result = r.Result
	f.lines = strings.Split(cmp.Or(r.Message, r.GetStatus().GetMessage()), "\n")
	return nil
}

// summary describes how f ended, for a person.
func (f *failure) summary() string {
	text := codes.Code(f.entry.Code).String()
	if codes.Code(f.entry.Code) == codes.OK {
		text = fmt.Sprintf("exit code %d", f.entry.ExitCode)
	}
	text += " at " + f.entry.Time.AsTime().UTC().Format(time.RFC3339)
	if f.entry.InvocationId != "" {
		text += ", invocation " + render.Quote(f.entry.InvocationId)
	}
	return text
}

// errEvicted is the error for a result that the server has evicted.
func (f *failure) errEvicted(action cas.Digest) error {
	return exit.New(exit.Absent, fmt.Errorf("action %s failed (%s), but the server has evicted its result; raise --history-size to protect more failures", action, f.summary()))
}

// writeText prints f for a person, with everything that a client or action chose quoted.
func (f *failure) writeText(p *render.Page) {
	p.Line("failed", f.summary())
	for _, line := range f.lines {
		if line != "" {
			p.Line("message", printable.Text(line))
		}
	}
	switch {
	case f.evicted:
		p.Line("result", "evicted")
	case f.result != nil:
		p.Result(f.result)
	default:
		p.Line("result", "none: the action did not finish")
	}
}
