// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
)

const (
	dnsPort  = 53
	maxQuery = 1232 // bytes; the size that resolvers agree to send
)

// question returns the question of a DNS query, and false if the packet is not a query.
func question(packet []byte) (dnsmessage.Header, dnsmessage.Question, bool) {
	var p dnsmessage.Parser
	h, err := p.Start(packet)
	if err != nil || h.Response {
		return h, dnsmessage.Question{}, false
	}
	q, err := p.Question()
	return h, q, err == nil
}

// hostOf returns the name of a question, in lower case and without the final dot.
func hostOf(q *dnsmessage.Question) string {
	name := strings.ToLower(q.Name.String())
	if name == "." {
		return name
	}
	return strings.TrimSuffix(name, ".")
}

// typeOf returns the type of a question: "AAAA", "TYPE65".
func typeOf(q *dnsmessage.Question) string {
	name := q.Type.String()
	if short, ok := strings.CutPrefix(name, "Type"); ok {
		return short
	}
	return "TYPE" + name
}

// ownName reports whether a name is that of the run's own loopback, whose lookups are not recorded.
func ownName(host string) bool {
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || strings.HasSuffix(host, ".127.in-addr.arpa")
}

// reply returns the answer to a question: the address for type A, no record for other types, and NXDOMAIN if at is not
// valid.
func reply(h *dnsmessage.Header, q *dnsmessage.Question, at netip.Addr) ([]byte, error) {
	m := dnsmessage.Message{
		Header: dnsmessage.Header{
			ID: h.ID, Response: true, OpCode: h.OpCode, RecursionDesired: h.RecursionDesired, RecursionAvailable: true,
		},
		Questions: []dnsmessage.Question{*q},
	}
	switch {
	case !at.IsValid():
		m.RCode = dnsmessage.RCodeNameError
	case q.Type == dnsmessage.TypeA:
		m.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class},
			Body:   &dnsmessage.AResource{A: at.As4()},
		}}
	}
	return m.Pack()
}

// lookups counts the names that a run looked up. The methods may be called concurrently.
type lookups struct {
	mu    sync.Mutex
	asked map[asker]map[string]int // counts by type
	more  int                      // lookups beyond the limits
}

// An asker is a process that looks up a name.
type asker struct{ name, process string }

// add records one lookup, or without a name a datagram that is not a query.
func (l *lookups) add(name, kind, process string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asked == nil {
		l.asked = map[asker]map[string]int{}
	}
	key := asker{name, process}
	types := l.asked[key]
	switch {
	case types == nil && len(l.asked) == maxKind, len(types) == maxTypes && types[kind] == 0:
		l.more++
		return
	case types == nil:
		types = map[string]int{}
		l.asked[key] = types
	}
	types[kind]++
}

// maxTypes is the maximum number of recorded types of one name.
const maxTypes = 10

// recordLookups records the lookups as events. A program that asks for several types of a name counts once.
func (r *Monitor) recordLookups() {
	r.lookups.mu.Lock()
	defer r.lookups.mu.Unlock()
	for key, types := range r.lookups.asked {
		e := sandbox.Event{
			Kind: sandbox.EventConnect, Subject: "dns " + printable.Quote(key.name, maxSubject-len("dns ")), Process: key.process,
			Count: slices.Max(slices.Collect(maps.Values(types))), Detail: strings.Join(slices.Sorted(maps.Keys(types)), ", "),
		}
		if key.name == "" {
			e.Subject, e.Detail = "udp 127.0.0.1:53", "not a query"
		}
		r.record(e)
	}
	r.unrecorded += r.lookups.more
}
