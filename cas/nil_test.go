// SPDX-License-Identifier: Apache-2.0

package cas_test

import (
	"errors"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestNilArgumentsAreErrors that name the missing argument.
func TestNilArgumentsAreErrors(t *testing.T) {
	ctx, s := t.Context(), castest.NewMemory()
	blob := must.Get(cas.PutBytes(ctx, s, cas.SHA256, []byte{0x0a, 0x00}))(t)
	var absent *repb.Command
	const result, message = "the ActionResult is missing", "the message is missing"
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"CheckOutputs":           {cas.CheckOutputs(nil), result},
		"CheckInlined":           {cas.CheckInlined(cas.SHA256, nil), result},
		"CheckRecord":            {cas.CheckRecord(blob, nil), result},
		"Closure":                {second(cas.Closure(ctx, s, cas.SHA256, nil)), result},
		"Inline":                 {cas.Inline(ctx, s, nil, everything(1000)), result},
		"Inline without Hints":   {cas.Inline(ctx, s, &repb.ActionResult{}, cas.Inlining{Function: cas.SHA256}), "Inlining.Hints is missing"},
		"CheckMessage":           {cas.CheckMessage(nil, nil), message},
		"ReadProto":              {cas.ReadProto(ctx, s, blob, nil), message},
		"ReadProto, a typed nil": {cas.ReadProto(ctx, s, blob, absent), message},
		"ReadSized":              {second(cas.ReadSized(ctx, s, blob, absent)), message},
		"DecodeSized":            {second(cas.DecodeSized(nil, blob, nil)), message},
		"FromProto":              {second(cas.FromProto(cas.SHA256, nil)), "digest"},
	} {
		expect.That(t, errors.Is(c.err, cas.ErrInvalid) && strings.Contains(c.err.Error(), c.want),
			"%s: got %v, want ErrInvalid with %q", name, c.err, c.want)
	}
	expect.Message(t, expect.Err(cas.LookupComplete(ctx, nil, blob)), "the Instance is missing", "LookupComplete")
}

// second returns the error of a call.
func second[T any](_ T, err error) error { return err }
