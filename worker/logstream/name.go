// SPDX-License-Identifier: Apache-2.0

package logstream

import (
	"crypto/subtle"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// segment is the fixed segment in names of streams:
//
//	read:  [INSTANCE/]logstreams/ID
//	write: [INSTANCE/]logstreams/ID/TOKEN
const segment = "logstreams"

// name returns the name for reading s.
func (s *stream) name() string { return join(s.instance, segment, s.id) }

// join joins parts of a name; the first may be empty.
func join(parts ...string) string {
	if parts[0] == "" {
		parts = parts[1:]
	}
	return strings.Join(parts, "/")
}

// A form is one of the two forms of names; its value is the number of segments after logstreams.
type form int

const (
	reading form = 1
	writing form = 2
)

// split returns the ID and, for writing, the token of a name, or INVALID_ARGUMENT. A name of one form is not valid for
// the other (rule 127).
func split(name string, want form) (id, token string, err error) {
	segs := strings.Split(name, "/")
	has := func(f form) bool { return len(segs) > int(f) && segs[len(segs)-int(f)-1] == segment }
	switch {
	case slices.Contains(segs, ""):
		return "", "", status.Errorf(codes.InvalidArgument, "log stream name %+.256q has an empty segment", name)
	case want == reading && has(reading):
		return segs[len(segs)-1], "", nil
	case want == writing && has(writing):
		return segs[len(segs)-2], segs[len(segs)-1], nil
	case want == reading && has(writing):
		// Do not quote it: the token is a secret, and errors are logged.
		return "", "", status.Error(codes.InvalidArgument, "a log stream's write_resource_name is not for reading; read its name, without the token")
	case want == writing && has(reading):
		return "", "", status.Errorf(codes.InvalidArgument, "log stream name %+.256q is for reading; write to its write_resource_name", name)
	}
	return "", "", status.Errorf(codes.InvalidArgument, "log stream name %+.256q does not have the form [INSTANCE/]logstreams/ID[/TOKEN]", name)
}

// readable returns the stream to read by name, or a status. The ID in the name may be a full name, because the Go SDK
// uses the name in an operation's metadata as an ID.
func (r *Registry) readable(name string) (*stream, error) {
	id, _, err := split(name, reading)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.streams[id]
	if s == nil || name != s.name() && name != join(s.instance, segment, s.name()) {
		return nil, status.Errorf(codes.NotFound, "log stream %+.256q is unknown, or ended too long ago", name)
	}
	return s, nil
}

// writable returns the stream to write by name, or a status.
func (r *Registry) writable(name string) (*stream, error) {
	id, token, err := split(name, writing)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.streams[id]
	if s == nil || s.token == "" || subtle.ConstantTimeCompare([]byte(token), []byte(s.token)) == 0 || name != join(s.name(), token) {
		return nil, status.Errorf(codes.NotFound, "no log stream has ID %+.64q and this token, or it ended too long ago", id)
	}
	return s, nil
}
