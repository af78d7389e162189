// SPDX-License-Identifier: Apache-2.0

package logstream

import (
	"crypto/subtle"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// segment is what separates the parts of the names of streams:
//
//	read:  [INSTANCE/]logstreams/ID
//	write: [INSTANCE/]logstreams/ID/TOKEN
const segment = "logstreams"

// name returns the name by which s is read.
func (s *stream) name() string { return join(s.instance, segment, s.id) }

// join returns the name of these parts, of which the first may be empty.
func join(parts ...string) string {
	if parts[0] == "" {
		parts = parts[1:]
	}
	return strings.Join(parts, "/")
}

// A form is one of the two in which names are written.
type form int

const (
	reading form = 1 // segments after logstreams
	writing form = 2
)

// split returns the id, and the token if there is one, of a name, or INVALID_ARGUMENT for one of the other form:
// neither may be used for the other (rule 127).
func split(name string, want form) (id, token string, err error) {
	segs := strings.Split(name, "/")
	is := func(f form) bool { return len(segs) > int(f) && segs[len(segs)-int(f)-1] == segment }
	switch {
	case slices.Contains(segs, ""):
		return "", "", status.Errorf(codes.InvalidArgument, "log stream name %+.256q has an empty segment", name)
	case want == reading && is(reading):
		return segs[len(segs)-1], "", nil
	case want == writing && is(writing):
		return segs[len(segs)-2], segs[len(segs)-1], nil
	case want == reading && is(writing):
		// Not repeated here: it is a secret, and errors go into logs.
		return "", "", status.Error(codes.InvalidArgument, "a write_resource_name of a log stream is not for reading: read its name, which has no token")
	case want == writing && is(reading):
		return "", "", status.Errorf(codes.InvalidArgument, "log stream name %+.256q is for reading: write to its write_resource_name", name)
	}
	return "", "", status.Errorf(codes.InvalidArgument, "log stream name %+.256q does not have the form [INSTANCE/]logstreams/ID[/TOKEN]", name)
}

// readable returns the stream to read by name, or a status. The name of the stream may stand in the place of an id, since the
// SDK for Go takes what an operation's metadata says for one.
func (r *Registry) readable(name string) (*stream, error) {
	id, _, err := split(name, reading)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.streams[id]
	if s == nil || name != s.name() && name != join(s.instance, segment, s.name()) {
		return nil, status.Errorf(codes.NotFound, "log stream %+.256q is not known, or ended too long ago", name)
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
		return nil, status.Errorf(codes.NotFound, "there is no log stream with id %+.64q and this token, or it ended too long ago", id)
	}
	return s, nil
}
