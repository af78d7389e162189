// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
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

// TestRestsShortenGradually checks that the sender reaches full speed, but gradually.
func TestRestsShortenGradually(t *testing.T) {
	for _, c := range []struct {
		waited time.Duration
		n      int
		want   float64
	}{
		{0, 1, 1},
		{5 * time.Minute, 100_000, 1},
		{10 * time.Minute, 1, 0.5},
		{0, 200_000, 0.5},
		{6 * time.Minute, 250_000, 0.25},
		{15 * time.Minute, 1, 0},
		{0, 300_000, 0},
		{24 * time.Hour, 1_000_000, 0},
	} {
		expect.Equal(t, restShare(c.waited, c.n), c.want, "share after %v with %d entries", c.waited, c.n)
	}
}

// TestRepeatedWritesAreBounded checks that repeated writes of the same blobs do not accumulate
// while nobody takes entries.
func TestRepeatedWritesAreBounded(t *testing.T) {
	p := must.Get(openPending(filepath.Join(t.TempDir(), "journal"), false, newUses(-1)))(t)
	t.Cleanup(func() { must.Succeed(t, p.log.Close()) })
	ds := make([]cas.Digest, maxWaiting/8)
	for i := range ds {
		ds[i] = cas.SHA256.Sum(fmt.Append(nil, i))
	}
	for range 12 {
		must.Succeed(t, p.add(blob, "", ds...))
		expect.That(t, p.waiting <= maxWaiting, "%d digests wait, want at most %d", p.waiting, maxWaiting)
	}
	expect.Equal(t, p.len(), len(ds), "pending blobs")
	expect.Equal(t, p.waiting, 0, "digests in batches after the set was needed")
}

// TestLargeBacklogShortensRetriesOfResultsOnly checks that a blob that the upstream rejects is retried for a day, even
// if many entries are pending.
func TestLargeBacklogShortensRetriesOfResultsOnly(t *testing.T) {
	p := must.Get(openPending(filepath.Join(t.TempDir(), "journal"), false, newUses(-1)))(t)
	t.Cleanup(func() { must.Succeed(t, p.log.Close()) })
	ds := make([]cas.Digest, maxBacklog)
	for i := range ds {
		ds[i] = cas.SHA256.Sum(fmt.Append(nil, i))
	}
	o := &Overlay{pending: p}
	must.Succeed(t, p.add(blob, "", ds...))
	must.Succeed(t, p.add(result, "", ds[0]))
	expect.That(t, !o.outdated(entry{blob, "", ds[0]}), "a new blob is outdated")
	expect.That(t, o.outdated(entry{result, "", ds[0]}), "a new result is not outdated")
	p.drop("", ds[0])
	expect.That(t, !o.outdated(entry{result, "", ds[0]}), "a new result is outdated without a large backlog")
}

// TestItemsWithEqualHashes checks that entries whose hashes are equal stay apart.
func TestItemsWithEqualHashes(t *testing.T) {
	set := newItems()
	var all []*item
	for n := range 3 {
		i := set.newItem(entry{blob, "", cas.SHA256.Sum([]byte{byte(n)})}, time.Time{})
		i.hash = 1
		set.add(&i)
		all = append(all, &i)
	}
	for n, want := range []int{2, 1, 0} {
		removed := all[(n+1)%3]
		set.remove(removed)
		expect.That(t, set.n == want && set.byHash[1].find(removed.entry) == nil,
			"got %d items, want %d without the removed one", set.n, want)
		for m := n + 1; m < 3; m++ {
			if left := all[(m+1)%3]; set.byHash[1].find(left.entry) != left {
				t.Errorf("item %d is lost", (m+1)%3)
			}
		}
	}
	expect.That(t, len(set.byHash) == 0, "%d hashes are left, want none", len(set.byHash))
}
