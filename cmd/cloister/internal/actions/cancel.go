// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Cancel is the flags of action cancel.
type Cancel struct {
	From       client.Server
	Invocation string
	JSON       bool
}

// Run cancels the unfinished executions that name and the flags select, and prints them. It needs no history, which
// only has executions that ended.
func (c *Cancel) Run(ctx context.Context, name string, out io.Writer) error {
	conn, instance, err := c.From.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	l := &logs{Log: &Log{From: c.From}, conn: conn, instance: instance}
	operations := longrunningpb.NewOperationsClient(conn)
	list := &List{From: c.From, Invocation: c.Invocation, Limit: 1000}
	var only func(Execution) bool
	recent, unique := 0, false
	switch m := client.Recent.FindStringSubmatch(name); {
	case m != nil:
		recent, _ = strconv.Atoi(m[1]) // the pattern admits only small numbers
	case name == "":
	case client.Target.MatchString(name):
		list.Target = name
	case client.DigestPrefix.MatchString(name):
		unique = true
		only = func(e Execution) bool {
			_, hash, _ := strings.Cut(e.Action, ":")
			return strings.HasPrefix(e.Action, name) || strings.HasPrefix(hash, name)
		}
	default:
		only = func(e Execution) bool { return e.Operation == name }
	}
	if list.Invocation != "" {
		if list.Invocation, err = c.From.Invocation(ctx, list.Invocation); err != nil {
			return err
		}
		list.Invocation = strings.TrimSuffix(list.Invocation, "*") + "*" // a build that has just begun is not in the history
	}
	var found []Execution
	err = list.executions(ctx, func(e Execution) (bool, error) {
		if e.Status == "" && (only == nil || only(e)) {
			found = append(found, e)
		}
		return true, nil
	})
	if err != nil {
		return err
	}
	if recent > 0 {
		found = found[min(recent-1, len(found)):min(recent, len(found))]
	}
	what := cmp.Or(name, "invocation "+c.Invocation)
	none := exit.New(exit.Absent, fmt.Errorf("%s: no queued or running execution at %s, instance %q, matches",
		render.Quote(what), c.From.Address, instance))
	if len(found) == 0 {
		return none
	}
	if i := slices.IndexFunc(found, func(e Execution) bool { return e.Action != found[0].Action }); unique && i > 0 {
		return exit.New(exit.No, fmt.Errorf("%s: several actions have this prefix: %s, %s", name, found[0].Action, found[i].Action))
	}
	if i := slices.IndexFunc(found, func(e Execution) bool { return e.Instance != found[0].Instance }); i > 0 {
		return exit.New(exit.Usage, fmt.Errorf("%s selects executions in the instances %q and %q: select one with --instance",
			render.Quote(what), found[0].Instance, found[i].Instance))
	}
	cancelled := []Execution{}
	var failure error // the first; the others are cancelled nevertheless
	for _, e := range found {
		_, err := operations.CancelOperation(ctx, &longrunningpb.CancelOperationRequest{Name: e.Operation})
		if status.Code(err) == codes.NotFound {
			continue // it ended meanwhile
		}
		if err != nil {
			failure = cmp.Or(failure, l.explain("cancel operation "+render.Quote(e.Operation), err))
			continue
		}
		cancelled = append(cancelled, e)
		if c.JSON {
			continue
		}
		line := "cancelled " + render.Quote(e.Action) + "  " + render.Quote(e.Operation)
		if text := strings.TrimSpace(e.Mnemonic + " " + e.Target); text != "" {
			line += "  " + render.Quote(text)
		}
		if _, err := fmt.Fprintln(out, line); err != nil {
			failure = cmp.Or[error](failure, exit.New(exit.No, err))
		}
	}
	if failure == nil && len(cancelled) == 0 {
		return none
	}
	if c.JSON {
		failure = cmp.Or(failure, render.JSON(out, cancelled))
	}
	return failure
}
