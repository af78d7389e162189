// SPDX-License-Identifier: Apache-2.0

package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// An Action is an action that a command works on. If the server's history has it, it has the target, the mnemonic and
// the authenticated caller of its newest entry.
type Action struct {
	Digest                             cas.Digest
	Target, Mnemonic, Instance, Caller string
}

// NoteCallers writes a note if several callers have entries of a build: its invocation id is only the client's claim.
// An unknown caller is "".
func NoteCallers(w io.Writer, id string, callers []string) {
	if len(callers) < 2 {
		return
	}
	names := make([]string, len(callers))
	for i, c := range callers {
		names[i] = render.Quote(cmp.Or(c, "(unknown)"))
	}
	fmt.Fprintf(w, "note: several callers have entries of build %s: %s\n", render.Quote(id), strings.Join(names, ", "))
}

// A Filter selects actions of a server's history. A trailing * in a text matches every ending, and a
// trailing /... in a target all targets in and below the package.
type Filter struct {
	Invocation, Target, Mnemonic string
	Failed                       bool
	All                          bool
}

// Set reports whether f selects anything.
func (f *Filter) Set() bool { return f.All || f.Failed || f.Invocation+f.Target+f.Mnemonic != "" }

// Request returns the request for the entries that f selects.
func (f *Filter) Request(limit int) *cloisterpb.ListHistoryRequest {
	return &cloisterpb.ListHistoryRequest{
		InvocationId: f.Invocation, TargetId: f.Target, ActionMnemonic: f.Mnemonic, Failed: f.Failed,
		Limit: int32(min(limit, math.MaxInt32)),
	}
}

// ErrNoHistory means that the server keeps no history, or shows none to this caller.
var ErrNoHistory = errors.New("no history")

// History calls visit for the entries of the server's history that req selects, newest first, up to its limit, which
// must not be 0. The instance is that of s, unless req selects all. It returns ErrNoHistory if the server keeps no
// history or does not show it.
func (s *Server) History(ctx context.Context, req *cloisterpb.ListHistoryRequest, visit func(*cloisterpb.HistoryEntry) error) error {
	conn, instance, err := s.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !req.AllInstances {
		req.InstanceName = instance
	}
	left := req.Limit
	stream, err := cloisterpb.NewHistoryClient(conn).List(ctx, req)
	for err == nil {
		var page *cloisterpb.ListHistoryResponse
		if page, err = stream.Recv(); err != nil {
			break
		}
		for _, e := range page.Entries {
			if left == 0 {
				return nil // the server ignores the limit
			}
			left--
			if err := visit(e); err != nil {
				return err
			}
		}
	}
	if err == io.EOF {
		return nil
	}
	return s.explainHistory(err)
}

func (s *Server) explainHistory(err error) error {
	reason := remote.Reason(status.Convert(err))
	switch status.Code(err) {
	case codes.Unimplemented:
		return exit.New(exit.No, fmt.Errorf("the server at %s keeps %w: it does not serve cloister.v1.History", s.Address, ErrNoHistory))
	case codes.PermissionDenied:
		return exit.New(exit.No, fmt.Errorf("the server at %s shows %w: %w", s.Address, ErrNoHistory, Reason(err)))
	case codes.Unavailable, codes.DeadlineExceeded:
		return s.Unreachable(reason)
	}
	return exit.New(exit.No, fmt.Errorf("history of %s: %w", s.Address, Reason(err)))
}

// Actions returns the distinct actions that f selects, newest first, up to a limit.
func (s *Server) Actions(ctx context.Context, f Filter, limit int) ([]Action, error) {
	return s.distinct(ctx, f.Request(limit))
}

// actions is Actions, but in all instances if no instance is named.
func (s *Server) actions(ctx context.Context, f Filter, limit int) ([]Action, error) {
	req := f.Request(limit)
	req.AllInstances = s.AllInstances()
	return s.distinct(ctx, req)
}

// Older returns the distinct actions that f selects and that no client requested since a time.
func (s *Server) Older(ctx context.Context, f Filter, since time.Time) ([]cas.Digest, error) {
	var err error
	if f.Invocation, err = s.Invocation(ctx, f.Invocation); err != nil {
		return nil, err
	}
	selected, err := s.Actions(ctx, f, math.MaxInt32)
	if err != nil {
		return nil, err
	}
	recent := map[string]bool{} // also by other builds than those of f
	err = s.History(ctx, (&Filter{All: true}).Request(math.MaxInt32), func(e *cloisterpb.HistoryEntry) error {
		if e.Time.AsTime().Before(since) {
			return errEnough // the latest entries are first
		}
		recent[e.Action] = recent[e.Action] || e.How != "checked"
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	var all []cas.Digest
	for _, a := range selected {
		if !recent[a.Digest.String()] {
			all = append(all, a.Digest)
		}
	}
	return all, nil
}

func (s *Server) distinct(ctx context.Context, req *cloisterpb.ListHistoryRequest) ([]Action, error) {
	req.Distinct = true
	var all []Action
	err := s.History(ctx, req, func(e *cloisterpb.HistoryEntry) error {
		a, err := s.ActionOf(e)
		all = append(all, a)
		return err
	})
	return all, err
}

// ActionOf returns the action of an entry of a history.
func (s *Server) ActionOf(e *cloisterpb.HistoryEntry) (Action, error) {
	d, err := cas.ParseDigest(e.Action)
	if err != nil {
		return Action{}, exit.New(exit.No, fmt.Errorf("history of %s, entry %d: %w", s.Address, e.Number, err))
	}
	return Action{d, e.TargetId, e.ActionMnemonic, e.InstanceName, e.Caller}, nil
}

// LatestRun returns the newest entry of the server's history that has a result of an action or the reason why there is
// none. It returns nil if there is no such entry, or if the server keeps or shows no history. With failed it returns
// the newest failure. Runs that clients cancelled or that a server lost count only if there is no other, since they say
// nothing about the action.
func (s *Server) LatestRun(ctx context.Context, action cas.Digest, failed bool) (latest *cloisterpb.HistoryEntry, err error) {
	const most = 1000
	req := &cloisterpb.ListHistoryRequest{Action: action.String(), Failed: failed, Limit: most}
	err = s.History(ctx, req, func(e *cloisterpb.HistoryEntry) error {
		switch code := codes.Code(e.Code); {
		case e.How == "absent", e.How == "checked":
		case code == codes.Canceled, code == codes.Unavailable:
			latest = cmp.Or(latest, e)
		default:
			latest = e
			return errEnough
		}
		return nil
	})
	if errors.Is(err, errEnough) || errors.Is(err, ErrNoHistory) {
		err = nil
	}
	return latest, err
}

// Failed reports whether an entry of a history is a failure; nil is not.
func Failed(e *cloisterpb.HistoryEntry) bool {
	return e != nil && (codes.Code(e.Code) != codes.OK || e.ExitCode != 0)
}

var (
	// Recent matches ^N, the Nth latest action.
	Recent = regexp.MustCompile(`^\^([1-9][0-9]{0,4})$`)
	// DigestPrefix matches the prefix of a digest.
	DigestPrefix = regexp.MustCompile(`^([a-z0-9]+:)?[0-9a-f]{8,}(/[0-9]*)?$`)
	// Target matches a Bazel label with its repository, and invocationPrefix the beginning of a UUID.
	Target           = regexp.MustCompile(`^@*[^/]*//`)
	invocationPrefix = regexp.MustCompile(`^[0-9a-f]{8}[0-9a-f-]{0,27}$`)
)

// Action returns the action that a name on the command line selects: HASH/SIZE, which needs no server, or by the
// server's history a prefix of at least eight digits, ^1 for the latest action, ^2 for the one before, or a target such
// as //pkg:name for its latest action. It also selects the instance of the action.
func (s *Server) Action(ctx context.Context, name string) (Action, error) {
	if a, ok := s.resolved[name]; ok {
		return a, nil
	}
	a, err := s.find(ctx, name)
	if err == nil {
		err = s.selectInstance(name, a.Instance)
	}
	if err != nil {
		return Action{}, err
	}
	if s.resolved == nil {
		s.resolved = map[string]Action{}
	}
	s.resolved[name] = a
	return a, nil
}

func (s *Server) find(ctx context.Context, name string) (Action, error) {
	if d, err := cas.ParseDigest(name); err == nil {
		return s.complete(ctx, d)
	}
	if m := Recent.FindStringSubmatch(name); m != nil {
		n, _ := strconv.Atoi(m[1]) // the pattern admits only small numbers
		return s.recent(ctx, name, n)
	}
	if Target.MatchString(name) {
		return s.ofTarget(ctx, name)
	}
	if err := CheckNames(name); err != nil {
		return Action{}, err
	}
	return s.byPrefix(ctx, name)
}

// CheckNames returns a usage error for a name that selects no action on any server.
func CheckNames(names ...string) error {
	for _, name := range names {
		_, err := cas.ParseDigest(name)
		if err != nil && !Recent.MatchString(name) && !Target.MatchString(name) && !DigestPrefix.MatchString(name) {
			return exit.New(exit.Usage, fmt.Errorf("%w; or write at least 8 digits of it, ^1 for the latest action, or a target such as //pkg:name", err))
		}
	}
	return nil
}

// complete returns the action of a digest, and its instance if the server shows its history.
func (s *Server) complete(ctx context.Context, d cas.Digest) (Action, error) {
	a := Action{Digest: d, Instance: s.Instance}
	if !s.AllInstances() {
		return a, nil
	}
	all, err := s.distinct(ctx, &cloisterpb.ListHistoryRequest{Action: d.String(), Limit: math.MaxInt32, AllInstances: true})
	if e, ok := errors.AsType[*exit.Error](err); ok && e.Code == exit.Unreachable {
		return a, err
	}
	if len(all) > 0 {
		return oneInstance(all)
	}
	return a, nil
}

// oneInstance returns the action of the instance without a name, or else the only one. Several others are a usage
// error.
func oneInstance(all []Action) (Action, error) {
	var names []string
	for _, a := range all {
		if a.Instance == "" || len(all) == 1 {
			return a, nil
		}
		names = append(names, strconv.Quote(a.Instance))
	}
	return Action{}, exit.New(exit.Usage, fmt.Errorf("%s is in the instances %s: select one with --instance", all[0].Digest, strings.Join(names, ", ")))
}

func (s *Server) ofTarget(ctx context.Context, label string) (Action, error) {
	all, err := s.actions(ctx, Filter{Target: label}, 1)
	switch {
	case errors.Is(err, ErrNoHistory):
		return Action{}, exit.New(exit.No, fmt.Errorf("%s: %w; write the digest of the action, as HASH/SIZE", label, err))
	case err != nil:
		return Action{}, err
	case len(all) == 0:
		return Action{}, exit.New(exit.Absent, fmt.Errorf("%s has no action of target %s; list its actions with cloister action ls", s.history(), label))
	}
	return all[0], nil
}

// history names the searched history in messages.
func (s *Server) history() string {
	if s.AllInstances() {
		return "the history of " + s.Address
	}
	return fmt.Sprintf("the history of %s, instance %q,", s.Address, s.Instance)
}

// errEnough ends reading a history early.
var errEnough = errors.New("enough")

// Invocation returns the id of the build that a name on the command line selects: by the server's history ^1 for the
// latest, or a prefix of at least eight digits of a UUID. Any other name is an id already. It also selects the instance
// of the build.
func (s *Server) Invocation(ctx context.Context, name string) (string, error) {
	number, req := 0, &cloisterpb.ListHistoryRequest{Limit: math.MaxInt32, AllInstances: s.AllInstances()}
	if m := Recent.FindStringSubmatch(name); m != nil {
		number, _ = strconv.Atoi(m[1]) // the pattern admits only small numbers
	} else if invocationPrefix.MatchString(name) {
		req.InvocationId = name + "*"
	} else {
		return name, nil
	}
	var ids []string
	instances := map[string]string{} // by id
	err := s.History(ctx, req, func(e *cloisterpb.HistoryEntry) error {
		if e.InvocationId != "" && !slices.Contains(ids, e.InvocationId) {
			ids = append(ids, e.InvocationId)
			instances[e.InvocationId] = e.InstanceName
		}
		if len(ids) == number {
			return errEnough
		}
		return nil
	})
	switch {
	case err != nil && !errors.Is(err, errEnough):
		return "", err
	case number > len(ids):
		return "", exit.New(exit.Absent, fmt.Errorf("%s: %s has only %s", name, s.history(), render.Count(len(ids), "build")))
	case number > 0:
		return ids[number-1], s.selectInstance(name, instances[ids[number-1]])
	case len(ids) > 1:
		return "", exit.New(exit.No, fmt.Errorf("%s: several builds have this prefix: %s", name, strings.Join(ids[:min(len(ids), 5)], ", ")))
	case len(ids) == 0:
		return name, nil // the command reports that the history has no such build
	}
	return ids[0], s.selectInstance(name, instances[ids[0]])
}

func (s *Server) recent(ctx context.Context, name string, n int) (Action, error) {
	all, err := s.actions(ctx, Filter{All: true}, n)
	switch {
	case errors.Is(err, ErrNoHistory):
		return Action{}, exit.New(exit.No, fmt.Errorf("%s: %w; write the digest of the action, as HASH/SIZE", name, err))
	case err != nil:
		return Action{}, err
	case len(all) < n:
		return Action{}, exit.New(exit.Absent, fmt.Errorf("%s: %s has only %s", name, s.history(), render.Count(len(all), "action")))
	}
	return all[n-1], nil
}

func (s *Server) byPrefix(ctx context.Context, name string) (Action, error) {
	const listed = 5
	all, err := s.distinct(ctx, &cloisterpb.ListHistoryRequest{Action: name, Limit: listed + 1, AllInstances: s.AllInstances()})
	switch {
	case errors.Is(err, ErrNoHistory):
		return Action{}, exit.New(exit.No, fmt.Errorf("%s: %w; write the whole digest, as HASH/SIZE", name, err))
	case err != nil:
		return Action{}, err
	case len(all) == 0:
		return Action{}, exit.New(exit.Absent, fmt.Errorf("%s: %s has no action with this prefix", name, s.history()))
	}
	var list []string
	for _, a := range all {
		if d := a.Digest.String(); !slices.Contains(list, d) {
			list = append(list, d)
		}
	}
	if len(list) > 1 {
		if len(list) > listed {
			list = append(list[:listed], "...")
		}
		return Action{}, exit.New(exit.No, fmt.Errorf("%s: several actions have this prefix: %s", name, strings.Join(list, ", ")))
	}
	return oneInstance(all)
}
