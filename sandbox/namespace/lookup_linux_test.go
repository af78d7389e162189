// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"slices"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/tests/expect"
)

// TestLookups: lookups of a Go program with its own resolver are recorded, in each run of a slot and however its
// network came to be. Without loopback they have no name, and unmonitored runs look nothing up.
func TestLookups(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	monitored := func(*sandbox.Spec) {}
	for i, c := range []struct {
		name string
		spec func(*sandbox.Spec)
		does []string
		text string
		want []string
	}{
		{"first", monitored, []string{"lookup=a.example.com"}, "not found by 127.0.0.1:53\n", []string{"dns a.example.com"}},
		{"second", monitored, []string{"lookup=b.example.com"}, "not found by 127.0.0.1:53\n", []string{"dns b.example.com"}},
		{"none, so that the network is kept", monitored, []string{"link=/proc/self/ns/net"}, "", nil},
		{"in a kept network", monitored, []string{"lookup=c.example.com"}, "not found by 127.0.0.1:53\n", []string{"dns c.example.com"}},
		{"none again", monitored, []string{"link=/proc/self/ns/net"}, "", nil},
		{"unmonitored", func(s *sandbox.Spec) { s.Audit = sandbox.AuditOff }, []string{"lookup=d.example.com"}, "not found by \n", nil},
		{"monitored again", monitored, []string{"lookup=e.example.com"}, "not found by 127.0.0.1:53\n", []string{"dns e.example.com"}},
		{"without loopback", func(s *sandbox.Spec) { s.Network = sandbox.Network{} }, []string{"lookup=f.example.com"}, "", []string{"udp 127.0.0.1:53", "udp [::1]:53"}},
		{"with loopback again", monitored, []string{"lookup=g.example.com"}, "not found by 127.0.0.1:53\n", []string{"dns g.example.com"}},
	} {
		r := program(t, c.does...)
		set := r.Spec
		r.Spec = func(s *sandbox.Spec) { set(s); c.spec(s) }
		r.Do(t, b)
		var got []string
		for _, e := range r.Result.Events {
			if e.Kind == sandbox.EventConnect {
				got = append(got, e.Subject)
			}
			expect.That(t, e.Process == "inside", "%d, %s: got %+v, want its process", i, c.name, e)
		}
		if !slices.Equal(got, c.want) || c.text != "" && r.Stdout != c.text || b.Slots() != 1 {
			t.Errorf("%d, %s: in one of %d slots, got %q and events %q, want %q and %q; %s", i, c.name, b.Slots(), r.Stdout, got, c.text, c.want, r.Stderr)
		}
	}
}
