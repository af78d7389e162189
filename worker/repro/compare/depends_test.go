// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"archive/zip"
	"bytes"
	"crypto/md5"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

// A digest of a member or of another output is reported with its name, and without a fix of its own.
func TestDigestsNameWhatTheyDependOn(t *testing.T) {
	member := "data"
	packed := func(sum func(content string) string, content string) string {
		var out bytes.Buffer
		w := zip.NewWriter(&out)
		for name, text := range map[string]string{"RECORD": "data,sha256=" + sum(content) + ",9\n", member: content} {
			f, err := w.Create(name)
			must.Succeed(t, err)
			_, err = f.Write([]byte(text))
			must.Succeed(t, err)
		}
		must.Succeed(t, w.Close())
		return out.String()
	}
	sha := func(s string) []byte { sum := sha256.Sum256([]byte(s)); return sum[:] }
	for name, sum := range map[string]func(string) string{
		"hexadecimal": func(s string) string { return hex.EncodeToString(sha(s)) },
		"base64":      func(s string) string { return base64.RawURLEncoding.EncodeToString(sha(s)) },
		"MD5":         func(s string) string { sum := md5.Sum([]byte(s)); return hex.EncodeToString(sum[:]) },
	} {
		ds := blobs(t, "a.whl", packed(sum, "made on Monday"), packed(sum, "made on Tuesday"), Known{})
		found := false
		for _, d := range ds {
			if strings.Contains(d.What, "which depends on data") {
				found = Follows(&d) && d.Fix == "" && d.Cause == Unknown
			}
		}
		if !found {
			t.Errorf("%s: got %+v", name, ds)
		}
	}
	hexadecimal := func(s string) string { return hex.EncodeToString(sha(s)) }
	member = "data\x1b]0;title\x07" + strings.Repeat("x", 300) // blobs checks each text
	ds := blobs(t, "a.whl", packed(hexadecimal, "made on Monday"), packed(hexadecimal, "made on Tuesday"), Known{})
	if !slices.ContainsFunc(ds, func(d Difference) bool { return Follows(&d) }) {
		t.Errorf("a name with control characters: got %+v", ds)
	}
	a, b := hex.EncodeToString(sha("a")), hex.EncodeToString(sha("b"))
	k := Known{&Facts{Digests: map[string]string{a: "lib.so"}}, &Facts{Digests: map[string]string{b: "lib.so"}}}
	if ds := blobs(t, "sums", a+"  lib.so\n", b+"  lib.so\n", k); len(ds) != 1 || ds[0].What != "line 1, which depends on lib.so" {
		t.Errorf("got %+v", ds)
	}
	k.B.Digests[b] = "other.so"
	if ds := blobs(t, "sums", a+"  lib.so\n", b+"  lib.so\n", k); len(ds) != 1 || Follows(&ds[0]) {
		t.Errorf("digests of different outputs: got %+v", ds)
	}
	k.B.Digests[a] = "lib.so" // equal in both runs, and the text differs beside it
	if ds := blobs(t, "sums", a+"  at 10:00:01\n", a+"  at 10:00:02\n", k); len(ds) != 1 || Follows(&ds[0]) {
		t.Errorf("a digest that is the same: got %+v", ds)
	}
}
