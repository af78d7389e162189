// SPDX-License-Identifier: Apache-2.0

package main

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
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A subject is an action that a command is about, and what it was for, as far as that is known.
type subject struct {
	instance         string
	digest           cas.Digest
	target, mnemonic string
}

// A selection says which actions of a server's history are meant. A text that ends in an asterisk stands for all that
// begin so.
type selection struct {
	invocation, target, mnemonic string
	failed                       bool
	all                          bool
}

// any reports whether something is selected.
func (s *selection) any() bool { return s.all || s.failed || s.invocation+s.target+s.mnemonic != "" }

// errNoHistory is that a server remembers nothing, or nothing for this caller.
var errNoHistory = errors.New("no history")

// recall calls visit for the entries of the server's history that req wants, the newest first, and for no more of them than
// its limit, which is not 0. A server that keeps no history, or does not show it, is errNoHistory.
func (o *origin) recall(ctx context.Context, req *cloisterpb.ListHistoryRequest, visit func(*cloisterpb.HistoryEntry) error) error {
	conn, instance, err := o.dial()
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
		return newExit(exitNo, fmt.Errorf("the server at %s keeps %w: it does not serve cloister.v1.History", o.cas, errNoHistory))
	case codes.PermissionDenied:
		return newExit(exitNo, fmt.Errorf("the server at %s shows %w: %s", o.cas, errNoHistory, said))
	case codes.Unavailable, codes.DeadlineExceeded:
		return newExit(exitConnect, fmt.Errorf("history of %s: %s; name the server with --cas", o.cas, said))
	}
	if err == io.EOF {
		return nil
	}
	return newExit(exitNo, fmt.Errorf("history of %s: %s", o.cas, said))
}

// request returns what asks for the entries that s selects.
func (s *selection) request(limit int) *cloisterpb.ListHistoryRequest {
	return &cloisterpb.ListHistoryRequest{
		InvocationId: s.invocation, TargetId: s.target, ActionMnemonic: s.mnemonic, Failed: s.failed, Limit: int32(min(limit, math.MaxInt32)),
	}
}

// subjects returns the actions that s selects, each once, the newest first, at most limit of them.
func (o *origin) subjects(ctx context.Context, s selection, limit int) ([]subject, error) {
	req := s.request(limit)
	req.Distinct = true
	var all []subject
	err := o.recall(ctx, req, func(e *cloisterpb.HistoryEntry) error {
		one, err := o.subjectOf(e)
		all = append(all, one)
		return err
	})
	return all, err
}

// subjectOf reads an entry of a history.
func (o *origin) subjectOf(e *cloisterpb.HistoryEntry) (subject, error) {
	d, err := cas.ParseDigest(e.Action)
	if err != nil {
		return subject{}, newExit(exitNo, fmt.Errorf("history of %s, entry %d: %w", o.cas, e.Number, err))
	}
	return subject{o.instance, d, e.TargetId, e.ActionMnemonic}, nil
}

var (
	// nth is ^N, the Nth action before now, and shortened the beginning of a digest.
	nth       = regexp.MustCompile(`^\^([1-9][0-9]{0,4})$`)
	shortened = regexp.MustCompile(`^([a-z0-9]+:)?[0-9a-f]{8,}(/[0-9]*)?$`)
)

// subject returns the action of a name: HASH/SIZE, for which no server is asked; and, by the history of the server,
// the beginning of that, of at least eight digits, or ^1 for the action that was asked for last, ^2 for the one before.
func (o *origin) subject(ctx context.Context, name string) (subject, error) {
	d, err := cas.ParseDigest(name)
	if err == nil {
		return subject{instance: o.instance, digest: d}, nil
	}
	if m := nth.FindStringSubmatch(name); m != nil {
		n, _ := strconv.Atoi(m[1]) // a number, as it looks like one
		all, err := o.subjects(ctx, selection{all: true}, n)
		switch {
		case errors.Is(err, errNoHistory):
			return subject{}, newExit(exitNo, fmt.Errorf("%s: %w; write the digest of the action, as HASH/SIZE", name, err))
		case err != nil:
			return subject{}, err
		case len(all) < n:
			return subject{}, newExit(exitAbsent, fmt.Errorf("%s: the history of %s, instance %q, has %d actions", name, o.cas, o.instance, len(all)))
		}
		return all[n-1], nil
	}
	if !shortened.MatchString(name) {
		return subject{}, err
	}
	return o.beginning(ctx, name)
}

// beginning returns the one action whose digest begins so.
func (o *origin) beginning(ctx context.Context, name string) (subject, error) {
	const named = 5
	var all []subject
	err := o.recall(ctx, &cloisterpb.ListHistoryRequest{Action: name, Distinct: true, Limit: named + 1}, func(e *cloisterpb.HistoryEntry) error {
		one, err := o.subjectOf(e)
		all = append(all, one)
		return err
	})
	switch {
	case errors.Is(err, errNoHistory):
		return subject{}, newExit(exitNo, fmt.Errorf("%s: %w; write all of the digest, as HASH/SIZE", name, err))
	case err != nil:
		return subject{}, err
	case len(all) == 0:
		return subject{}, newExit(exitAbsent, fmt.Errorf("%s: the history of %s, instance %q, has no action that begins so", name, o.cas, o.instance))
	case len(all) > 1:
		var list []string
		for _, s := range all[:min(len(all), named)] {
			list = append(list, s.digest.String())
		}
		if len(all) > named {
			list = append(list, "...")
		}
		return subject{}, newExit(exitNo, fmt.Errorf("%s: several actions begin so: %s", name, strings.Join(list, ", ")))
	}
	return all[0], nil
}
