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

// fresh returns size random bytes, so that no server has seen them before.
func fresh(size int) []byte {
	var seed [32]byte
	crand.Read(seed[:]) // never fails
	b := make([]byte, size)
	rand.NewChaCha8(seed).Read(b)
	return b
}

// freshBlob returns a blob of size random bytes and its digest.
func freshBlob(size int) ([]byte, *repb.Digest) {
	b := fresh(size)
	return b, cas.SHA256.Sum(b).Proto()
}

// absentDigest returns the digest of a blob that no server has.
func absentDigest(size int) *repb.Digest { return cas.SHA256.Sum(fresh(size)).Proto() }

// oneOf checks that got is ours or, if the server is not of this tree, one of the other values that the rule permits.
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

// wantCode checks the status code of err like oneOf. The request is described by what.
func (c *client) wantCode(what string, err error, ours codes.Code, others ...codes.Code) bool {
	c.Helper()
	s := status.Convert(err)
	if s.Code() != codes.OK {
		what = fmt.Sprintf("%s (%.300q)", what, s.Message())
	}
	return oneOf(c, what, s.Code(), ours, others...)
}

// wantText is wantCode and, for a server of this tree, checks that the error contains all parts.
func (c *client) wantText(what string, err error, parts []string, ours codes.Code, others ...codes.Code) {
	c.Helper()
	if !c.wantCode(what, err, ours, others...) || !c.ours {
		return
	}
	for _, part := range parts {
		if !strings.Contains(status.Convert(err).Message(), part) {
			c.Errorf("%s: got %v, want %q in the message", what, err, part)
		}
	}
}

// resource returns a ByteStream resource name in the client's instance.
func (c *client) resource(format string, args ...any) string {
	name := fmt.Sprintf(format, args...)
	if c.instance != "" {
		name = c.instance + "/" + name
	}
	return name
}

// uuid returns a new version 4 UUID.
func uuid() string {
	b := fresh(16)
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
