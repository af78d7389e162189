// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestFindPrefix: packed blobs, files and spliced blobs are found in their instance, results are not.
func TestFindPrefix(t *testing.T) {
	c := open(t, disk.Config{Dir: t.TempDir(), MaxBytes: 256 << 20, Pack: 1000})
	s := store(t, c, "main")
	packed, file := putSize(t, s, 1, 100), putSize(t, s, 2, 5000)
	_, spliced, _ := splice(t, s, 3, 700_000, 600_000)
	blake := cas.BLAKE3.Sum([]byte("text"))
	must.Succeed(t, s.Put(t.Context(), blake, strings.NewReader("text")))
	action := cas.SHA256.Sum([]byte("action"))
	must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{ExitCode: 1}))
	find := func(s *disk.Store, prefix string, limit int) []cas.Digest {
		t.Helper()
		ds, err := s.FindPrefix(t.Context(), prefix, limit)
		expect.Error(t, err, nil, "prefix %s", prefix)
		return ds
	}
	for _, d := range []cas.Digest{packed, file, spliced, blake} {
		whole := fmt.Sprintf("%s/%d", d.Hash(), d.Size())
		for _, prefix := range []string{whole[:8], whole[:13], d.Function().String() + ":" + whole[:8], whole, d.Hash() + "/"} {
			expect.Slices(t, find(s, prefix, 2), []cas.Digest{d}, "prefix %s", prefix)
		}
		other := d.Hash()[:12] + "0123"
		expect.Slices(t, find(s, other, 2), nil, "prefix %s", other)
	}
	for prefix, in := range map[string]*disk.Store{
		action.Hash()[:8]:             s,
		"blake3:" + packed.Hash()[:8]: s,
		packed.Hash()[:8]:             store(t, c, "other"),
		packed.Hash() + "/1000":       s,
	} {
		expect.Slices(t, find(in, prefix, 2), nil, "prefix %s", prefix)
	}
	for _, bad := range []string{"", "1234567", "1234567g", packed.Hash()[:8] + "*", "../" + packed.Hash()} {
		expect.Error(t, expect.Err(s.FindPrefix(t.Context(), bad, 1)), cas.ErrInvalid, "prefix %q", bad)
	}
}

// TestFindPrefixOfSeveral: the number of blobs with the same prefix is limited.
func TestFindPrefixOfSeveral(t *testing.T) {
	_, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 64 << 20})
	var both []cas.Digest
	for _, text := range collision() {
		d := cas.SHA256.Sum([]byte(text))
		must.Succeed(t, s.Put(t.Context(), d, strings.NewReader(text)))
		both = append(both, d)
	}
	slices.SortFunc(both, func(a, b cas.Digest) int { return strings.Compare(a.Hash(), b.Hash()) })
	prefix := both[0].Hash()[:8]
	expect.Slices(t, must.Get(s.FindPrefix(t.Context(), prefix, 5))(t), both)
	if got, err := s.FindPrefix(t.Context(), prefix, 1); err != nil || len(got) != 1 {
		t.Errorf("got %v, %v, want one", got, err)
	}
}

// collision returns two texts whose SHA-256 begins with the same 8 digits.
func collision() [2]string {
	seen := map[string]string{}
	for i := 0; ; i++ {
		text := fmt.Sprintf("blob %d\n", i)
		prefix := cas.SHA256.Sum([]byte(text)).Hash()[:8]
		if first, ok := seen[prefix]; ok {
			return [2]string{first, text}
		}
		seen[prefix] = text
	}
}
