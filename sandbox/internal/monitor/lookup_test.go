// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

const query = "\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07Example\x03com\x00\x00\x01\x00\x01"

func TestQuestions(t *testing.T) {
	for name, c := range map[string]struct{ packet, host, kind string }{
		"a query":        {query, "example.com", "A"},
		"another type":   {query[:len(query)-4] + "\xff\xfe\x00\x01", "example.com", "TYPE65534"},
		"the root":       {query[:12] + "\x00\x00\x02\x00\x01", ".", "NS"},
		"odd characters": {query[:12] + "\x03\x1b\n \x00\x00\x01\x00\x01", "\x1b\n ", "A"},
		"empty":          {"", "", ""},
		"a header":       {query[:12], "", ""},
		"cut short":      {query[:len(query)-1], "", ""},
		"an answer":      {query[:2] + "\x81" + query[3:], "", ""},
		"a loop":         {query[:12] + "\xc0\x0c\x00\x01\x00\x01", "", ""},
	} {
		_, q, ok := question([]byte(c.packet))
		if ok != (c.kind != "") {
			t.Errorf("%s: a query: %t", name, ok)
		} else if ok && (hostOf(&q) != c.host || typeOf(&q) != c.kind) {
			t.Errorf("%s: got %q, %s, want %q, %s", name, hostOf(&q), typeOf(&q), c.host, c.kind)
		}
	}
}

// TestLookupsAreBounded: a run that looks up many names or types has a limited number of events, in printable text.
func TestLookupsAreBounded(t *testing.T) {
	r := newMonitor(Config{})
	for i := range 3 * maxKind {
		r.lookups.add("a\x1b[2J b."+strconv.Itoa(i), "A", "p")
	}
	for i := range 2 * maxTypes {
		r.lookups.add("a\x1b[2J b.0", strconv.Itoa(i), "p")
	}
	r.recordLookups()
	close(r.done)
	events, unrecorded, _ := r.Events()
	expect.That(t, len(events) == maxKind && unrecorded == 2*maxKind+maxTypes+1,
		"got %d events and %d unrecorded ones, want %d and %d", len(events), unrecorded, maxKind, 2*maxKind+maxTypes+1)
	if e := events[0]; e.Kind != sandbox.EventConnect || e.Subject != `dns "a\x1b[2J b.0"` || strings.Count(e.Detail, ",") != maxTypes-1 {
		t.Errorf("got %+v, want the escaped name and %d types", e, maxTypes)
	}
}

func FuzzQuestion(f *testing.F) {
	f.Add([]byte(query))
	f.Fuzz(func(t *testing.T, packet []byte) {
		h, q, ok := question(packet)
		if !ok {
			return
		}
		for _, at := range []netip.Addr{{}, netip.AddrFrom4([4]byte{127, 1, 0, 1})} {
			answer := must.Get(reply(&h, &q, at))(t)
			var m dnsmessage.Message
			if err := m.Unpack(answer); err != nil || m.ID != h.ID || !m.Response || len(m.Questions) != 1 || m.Questions[0] != q {
				t.Errorf("the answer to %v is %v, %v", q, m, err)
			}
		}
	})
}
