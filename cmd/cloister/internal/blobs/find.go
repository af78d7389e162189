// SPDX-License-Identifier: Apache-2.0

package blobs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// searched is the number of latest actions whose blobs are searched for a prefix that the server's own store lacks:
	// they may be in its upstream.
	searched = 100
	// listed is the number of blobs that the error for an ambiguous prefix names.
	listed = 5
)

// WithStore is client.WithStore for names of blobs, which select the instance if --instance does not.
func WithStore(ctx context.Context, from *client.Server, names []string, f func(ctx context.Context, s *remote.Store) error) error {
	for _, name := range names {
		if _, err := cas.ParseDigest(name); err == nil {
			continue
		}
		// A prefix may be that of a blob, and Find returns the other errors.
		if _, err := from.Action(ctx, name); err == nil {
			break
		}
	}
	return client.WithStore(ctx, from, f)
}

// Find returns the digest of the blob that a name on the command line selects: HASH/SIZE, which needs no history, or a
// name of client.Server.Action for the message of that action or, with root, for its input root. A prefix that is no
// action's may be that of a blob in the server's own store, or of one to which one of the latest actions refers.
func Find(ctx context.Context, from *client.Server, s *remote.Store, name string, root bool) (cas.Digest, error) {
	if d, err := cas.ParseDigest(name); err == nil {
		return d, nil
	}
	a, err := from.Action(ctx, name)
	if e, ok := errors.AsType[*exit.Error](err); ok && client.DigestPrefix.MatchString(name) &&
		(e.Code == exit.Absent || errors.Is(err, client.ErrNoHistory)) {
		return byPrefix(ctx, from, s, name, err)
	}
	if err != nil || !root {
		return a.Digest, err
	}
	var message repb.Action
	if err := cas.ReadProto(ctx, s, a.Digest, &message); err != nil {
		return cas.Digest{}, fmt.Errorf("action %s: %w", a.Digest, err)
	}
	return cas.FromProto(a.Digest.Function(), message.InputRootDigest)
}

// FindAll is Find for several names of blobs.
func FindAll(ctx context.Context, from *client.Server, s *remote.Store, names []string) ([]cas.Digest, error) {
	var all []cas.Digest
	for _, name := range names {
		d, err := Find(ctx, from, s, name, false)
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

// byPrefix returns the only blob with a prefix. noAction is the error for a prefix that no action has.
func byPrefix(ctx context.Context, from *client.Server, s *remote.Store, prefix string, noAction error) (cas.Digest, error) {
	found, err := stored(ctx, from, prefix)
	if err == nil && len(found) == 0 {
		found, err = ofLatest(ctx, from, s, prefix)
	}
	switch {
	case errors.Is(err, client.ErrNoHistory):
		return cas.Digest{}, noAction
	case err != nil:
		return cas.Digest{}, err
	case len(found) == 0:
		return cas.Digest{}, exit.New(exit.Absent, fmt.Errorf("%s: no action in the history of %s, instance %q, no blob in its store, and no blob of its latest %d actions "+
			"has this prefix; write the whole digest, as HASH/SIZE", prefix, from.Address, from.Instance, searched))
	case len(found) == 1:
		return found[0], nil
	}
	var names []string
	for _, d := range found[:min(len(found), listed)] {
		names = append(names, d.String())
	}
	if len(found) > listed {
		names = append(names, "...")
	}
	return cas.Digest{}, exit.New(exit.No, fmt.Errorf("%s: several blobs have this prefix: %s; write more digits", prefix, strings.Join(names, ", ")))
}

// stored returns the blobs with a prefix in the server's own store, more than listed if there are many. It returns none
// if the server does not offer this search.
func stored(ctx context.Context, from *client.Server, prefix string) ([]cas.Digest, error) {
	conn, instance, err := from.Dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	m, err := cloisterpb.NewBlobIndexClient(conn).Find(ctx, &cloisterpb.FindRequest{InstanceName: instance, Prefix: prefix, Limit: listed + 1})
	if status.Code(err) == codes.Unimplemented {
		return nil, nil
	} else if err != nil {
		return nil, from.ExplainCall(err)
	}
	return beginningWith(prefix, m.Digests)
}

// beginningWith parses digests, which a server says begin with prefix. It returns an error if one does not, since its
// content would then match what the server chose instead of what was asked for.
func beginningWith(prefix string, digests []string) ([]cas.Digest, error) {
	function, hash, stated := strings.Cut(prefix, ":")
	if !stated {
		hash = prefix
	}
	found := make([]cas.Digest, len(digests))
	for i, text := range digests {
		d, err := cas.ParseDigest(text)
		if err != nil {
			return nil, err
		}
		if stated && function != d.Function().String() || !strings.HasPrefix(fmt.Sprintf("%s/%d", d.Hash(), d.Size()), hash) {
			return nil, fmt.Errorf("the server answered with %s, which does not begin with %s", d, prefix)
		}
		found[i] = d
	}
	return found, nil
}

// ofLatest returns the blobs with a prefix to which the latest actions refer.
func ofLatest(ctx context.Context, from *client.Server, s *remote.Store, prefix string) ([]cas.Digest, error) {
	latest, err := from.Actions(ctx, client.Filter{All: true}, searched)
	if err != nil {
		return nil, err
	}
	var found []cas.Digest
	for _, a := range latest {
		for _, d := range references(ctx, s, a.Digest) {
			if strings.HasPrefix(d.String(), prefix) && !slices.Contains(found, d) {
				found = append(found, d)
			}
		}
	}
	return found, nil
}

// references returns the blobs to which an action and its cached result refer, as far as they are present.
func references(ctx context.Context, s *remote.Store, action cas.Digest) []cas.Digest {
	var all []cas.Digest
	var message repb.Action
	if cas.ReadProto(ctx, s, action, &message) == nil {
		for _, p := range []*repb.Digest{message.CommandDigest, message.InputRootDigest} {
			if d, err := cas.FromProto(action.Function(), p); err == nil {
				all = append(all, d)
			}
		}
	}
	if r, err := s.Lookup(ctx, action); err == nil {
		if ds, _, err := actions.References(ctx, s, action.Function(), r); err == nil {
			all = append(all, ds...)
		}
	}
	return all
}
