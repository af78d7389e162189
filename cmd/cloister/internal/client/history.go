// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A subject is an action that a command is about, and what it was for, as far as that is known.
type Action struct {
	instance         string
	Digest           cas.Digest
	Target, Mnemonic string
}

// A selection says which actions of a server's history are meant. A text that ends in an asterisk stands for all that
// begin so.
type Filter struct {
	Invocation, Target, Mnemonic string
	Failed                       bool
	All                          bool
}

// Set reports whether something is selected.
func (s *Filter) Set() bool { return s.All || s.Failed || s.Invocation+s.Target+s.Mnemonic != "" }

// ErrNoHistory is that a server remembers nothing, or nothing for this caller.
var ErrNoHistory = errors.New("no history")

// History calls visit for the entries of the server's history that req wants, the newest first, and for no more of them than
// its limit, which is not 0. A server that keeps no history, or does not show it, is errNoHistory.
func (o *Server) History(ctx context.Context, req *cloisterpb.ListHistoryRequest, visit func(*cloisterpb.HistoryEntry) error) error {
	conn, instance, err := o.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req.InstanceName = instance
	left := req.Limit
	stream, err := cloisterpb.NewHistoryClient(conn).List(ctx, req)
	for err == nil {
		var page *cloisterpb.ListHistoryResponse
		if page, err = stream.Recv(); err != nil {
			break
		}
		for _, e := range page.Entries {
			if left == 0 {
				return nil // whatever else the server says
			}
			left--
			if err := visit(e); err != nil {
				return err
			}
		}
	}
	said := remote.Reason(status.Convert(err))
	switch status.Code(err) {
	case codes.Unimplemented:
		return exit.New(exit.No, fmt.Errorf("the server at %s keeps %w: it does not serve cloister.v1.History", o.Address, ErrNoHistory))
	case codes.PermissionDenied:
		return exit.New(exit.No, fmt.Errorf("the server at %s shows %w: %s", o.Address, ErrNoHistory, said))
	case codes.Unavailable, codes.DeadlineExceeded:
		return exit.New(exit.Unreachable, fmt.Errorf("history of %s: %s; name the server with --cas", o.Address, said))
	}
	if err == io.EOF {
		return nil
	}
	return exit.New(exit.No, fmt.Errorf("history of %s: %s", o.Address, said))
}

// Request returns what asks for the entries that s selects.
func (s *Filter) Request(limit int) *cloisterpb.ListHistoryRequest {
	return &cloisterpb.ListHistoryRequest{
		InvocationId: s.Invocation, TargetId: s.Target, ActionMnemonic: s.Mnemonic, Failed: s.Failed, Limit: int32(min(limit, math.MaxInt32)),
	}
}

// Actions returns the actions that s selects, each once, the newest first, at most limit of them.
func (o *Server) Actions(ctx context.Context, s Filter, limit int) ([]Action, error) {
	req := s.Request(limit)
	req.Distinct = true
	var all []Action
	err := o.History(ctx, req, func(e *cloisterpb.HistoryEntry) error {
		one, err := o.ActionOf(e)
		all = append(all, one)
		return err
	})
	return all, err
}

// ActionOf reads an entry of a history.
func (o *Server) ActionOf(e *cloisterpb.HistoryEntry) (Action, error) {
	d, err := cas.ParseDigest(e.Action)
	if err != nil {
		return Action{}, exit.New(exit.No, fmt.Errorf("history of %s, entry %d: %w", o.Address, e.Number, err))
	}
	return Action{o.Instance, d, e.TargetId, e.ActionMnemonic}, nil
}

var (
	// nth is ^N, the Nth action before now, and shortened the beginning of a digest.
	Recent       = regexp.MustCompile(`^\^([1-9][0-9]{0,4})$`)
	DigestPrefix = regexp.MustCompile(`^([a-z0-9]+:)?[0-9a-f]{8,}(/[0-9]*)?$`)
)

// Action returns the action of a name: HASH/SIZE, for which no server is asked; and, by the history of the server,
// the beginning of that, of at least eight digits, or ^1 for the action that was asked for last, ^2 for the one before.
func (o *Server) Action(ctx context.Context, name string) (Action, error) {
	d, err := cas.ParseDigest(name)
	if err == nil {
		return Action{instance: o.Instance, Digest: d}, nil
	}
	if m := Recent.FindStringSubmatch(name); m != nil {
		n, _ := strconv.Atoi(m[1]) // a number, as it looks like one
		all, err := o.Actions(ctx, Filter{All: true}, n)
		switch {
		case errors.Is(err, ErrNoHistory):
			return Action{}, exit.New(exit.No, fmt.Errorf("%s: %w; write the digest of the action, as HASH/SIZE", name, err))
		case err != nil:
			return Action{}, err
		case len(all) < n:
			return Action{}, exit.New(exit.Absent, fmt.Errorf("%s: the history of %s, instance %q, has %d actions", name, o.Address, o.Instance, len(all)))
		}
		return all[n-1], nil
	}
	if !DigestPrefix.MatchString(name) {
		return Action{}, err
	}
	return o.byPrefix(ctx, name)
}

// byPrefix returns the one action whose digest begins so.
func (o *Server) byPrefix(ctx context.Context, name string) (Action, error) {
	const named = 5
	var all []Action
	err := o.History(ctx, &cloisterpb.ListHistoryRequest{Action: name, Distinct: true, Limit: named + 1}, func(e *cloisterpb.HistoryEntry) error {
		one, err := o.ActionOf(e)
		all = append(all, one)
		return err
	})
	switch {
	case errors.Is(err, ErrNoHistory):
		return Action{}, exit.New(exit.No, fmt.Errorf("%s: %w; write all of the digest, as HASH/SIZE", name, err))
	case err != nil:
		return Action{}, err
	case len(all) == 0:
		return Action{}, exit.New(exit.Absent, fmt.Errorf("%s: the history of %s, instance %q, has no action that begins so", name, o.Address, o.Instance))
	case len(all) > 1:
		var list []string
		for _, s := range all[:min(len(all), named)] {
			list = append(list, s.Digest.String())
		}
		if len(all) > named {
			list = append(list, "...")
		}
		return Action{}, exit.New(exit.No, fmt.Errorf("%s: several actions begin so: %s", name, strings.Join(list, ", ")))
	}
	return all[0], nil
}
