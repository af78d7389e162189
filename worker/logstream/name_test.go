// SPDX-License-Identifier: Apache-2.0

package logstream

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cloister-build/cloister/tests/expect"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// FuzzStreamName checks that a name is for reading or for writing, not both, and that errors are INVALID_ARGUMENT in
// ASCII.
func FuzzStreamName(f *testing.F) {
	for _, name := range []string{
		"", "/", "logstreams", "logstreams/a", "logstreams/a/b", "a/b/logstreams/c", "a/b/logstreams/c/d", "logstreams//a",
		"logstreams/logstreams/a", "logstreams/logstreams/logstreams/logstreams", "a/logstreams/b/c/d", "blobs/x/1", "logstreams/\xff\x00",
	} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		id, _, readErr := split(name, reading)
		expect.That(t, readErr != nil || strings.HasSuffix("/"+name, "/logstreams/"+id), "split(%q) = %q", name, id)
		id, token, writeErr := split(name, writing)
		expect.That(t, writeErr != nil || strings.HasSuffix("/"+name, "/logstreams/"+id+"/"+token),
			"split(%q) = %q, %q", name, id, token)
		if writeErr == nil && readErr == nil && !strings.HasSuffix("/"+name, "/logstreams/logstreams/"+token) {
			t.Errorf("split(%q) succeeds for reading and for writing", name)
		}
		for _, err := range []error{readErr, writeErr} {
			if err == nil {
				continue
			}
			text := status.Convert(err).Message()
			if status.Code(err) != codes.InvalidArgument || !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Errorf("split(%q) = %q, want INVALID_ARGUMENT in ASCII", name, err)
			}
		}
	})
}
