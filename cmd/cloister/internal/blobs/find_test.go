// SPDX-License-Identifier: Apache-2.0

package blobs

import "testing"

// TestServerMustAnswerWithThePrefix: otherwise it would choose which content matches.
func TestServerMustAnswerWithThePrefix(t *testing.T) {
	const d = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855/0"
	for prefix, good := range map[string]bool{
		"e3b0c442": true, "sha256:e3b0c442": true, d[:64]: true, d[:64] + "/": true, d: true,
		"f3b0c442": false, "sha256:f3b0c442": false, "blake3:e3b0c442": false, d[:64] + "/1": false,
	} {
		if found, err := beginningWith(prefix, []string{d}); (err == nil) != good || good && len(found) != 1 {
			t.Errorf("%s: got %v, %v, want it accepted: %t", prefix, found, err, good)
		}
	}
}
