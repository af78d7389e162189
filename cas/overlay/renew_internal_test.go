// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// TestUsesBeyondTheQueueAreRenewedLater: a blob that finds the queue full is queued at its next use.
func TestUsesBeyondTheQueueAreRenewedLater(t *testing.T) {
	u := newUses(time.Hour)
	digest := func(i int) cas.Digest { return cas.SHA256.Sum(fmt.Append(nil, i)) }
	n := 0
	for ; len(u.due) < maxDue; n++ {
		u.add(blob, "", digest(n))
	}
	late := digest(n)
	for ; u.saw(u.hash(entry{blob, "", late})); n++ { // it shares its bit with another
		late = digest(n + 1)
	}
	u.add(blob, "", late)
	queued := func() (n int, found bool) {
		for due, _ := u.take(renewBatch); len(due) > 0; due, _ = u.take(renewBatch) {
			n += len(due)
			found = found || slices.Contains(due, entry{blob, "", late})
		}
		return n, found
	}
	if n, found := queued(); n != maxDue || found {
		t.Errorf("with a full queue: got %d entries, the last one among them: %t, want %d without it", n, found, maxDue)
	}
	u.add(blob, "", late)
	if n, found := queued(); n != 1 || !found {
		t.Errorf("at the next use: got %d entries, the blob among them: %t, want it alone", n, found)
	}
}
