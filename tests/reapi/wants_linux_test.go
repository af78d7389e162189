// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	crand "crypto/rand"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// novel returns size bytes that no server has seen before: a run must not find what another left.
func novel(size int) []byte {
	var seed [32]byte
	crand.Read(seed[:]) // never fails
	b := make([]byte, size)
	rand.NewChaCha8(seed).Read(b)
	return b
}

// unseen returns the digest of a blob that no server has.
func unseen(size int) *repb.Digest { return cas.SHA256.Sum(novel(size)).Proto() }

// oneOf checks that got is ours, or, of somebody else's server, one of others, too: what the rule permits. It
// reports whether that is so.
func oneOf[T comparable](c *client, what string, got, ours T, others ...T) bool {
	c.Helper()
	switch {
	case got == ours, !c.ours && slices.Contains(others, got):
		return true
	case c.ours || len(others) == 0:
		c.Errorf("%s: got %v, want %v", what, got, ours)
	default:
		c.Errorf("%s: got %v, want one of %v", what, got, append([]T{ours}, others...))
	}
	return false
}

// wantCode checks the status code of err as oneOf does; OK is no error. What was sent is in what.
func (c *client) wantCode(what string, err error, ours codes.Code, others ...codes.Code) bool {
	c.Helper()
	s := status.Convert(err)
	if s.Code() != codes.OK {
		what = fmt.Sprintf("%s (%.300q)", what, s.Message())
	}
	return oneOf(c, what, s.Code(), ours, others...)
}

// wantText is wantCode of an error whose text, on a server of ours, names each of parts, too.
func (c *client) wantText(what string, err error, parts []string, ours codes.Code, others ...codes.Code) {
	c.Helper()
	if !c.wantCode(what, err, ours, others...) || !c.ours {
		return
	}
	for _, part := range parts {
		if !strings.Contains(status.Convert(err).Message(), part) {
			c.Errorf("%s: got %v, want a text that names %q", what, err, part)
		}
	}
}

// resource is a ByteStream name of this client's instance.
func (c *client) resource(format string, args ...any) string {
	name := fmt.Sprintf(format, args...)
	if c.instance != "" {
		name = c.instance + "/" + name
	}
	return name
}

// uuid returns a version 4 UUID that nobody has used before.
func uuid() string {
	b := novel(16)
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
