// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// Rule 19: the operator chooses among digest functions with hashes of equal length.
func TestDefaultDigestFunction(t *testing.T) {
	var m DigestFunctions
	for _, s := range []string{"blake3", "git/hub=gitsha1", "old=sha256"} {
		must.Succeed(t, m.Set(s))
	}
	for _, s := range []string{"", "BLAKE3", "vso", "a//b=sha1", "=x"} {
		expect.That(t, m.Set(s) != nil, "Set(%q) is accepted", s)
	}
	instances := m.Instances(castest.Instances())
	for _, row := range []struct {
		instance string
		sample   cas.Digest
		want     cas.Function
	}{
		{"", cas.SHA256.Sum(nil), cas.BLAKE3},
		{"other", cas.BLAKE3.Sum(nil), cas.BLAKE3},
		{"other", cas.SHA1.Sum(nil), cas.SHA1},
		{"git/hub", cas.SHA1.Sum(nil), cas.GITSHA1},
		{"git/hub", cas.SHA256.Sum(nil), cas.SHA256},
		{"old", cas.SHA256.Sum(nil), cas.SHA256},
	} {
		in := must.Get(instances(row.instance))(t)
		got, err := in.FunctionOf(repb.DigestFunction_UNKNOWN, row.sample.Proto())
		if got != row.want || err != nil {
			t.Errorf("instance %q: a hash of %d digits is of %v, %v, want %v", row.instance, len(row.sample.Hash()), got, err, row.want)
		}
		expect.Equal(t, len(in.Serves()), len(cas.Functions()), "functions of instance %q", row.instance)
	}
	expect.Equal(t, m.String(), "blake3,git/hub=gitsha1,old=sha256", "the flag")
}
