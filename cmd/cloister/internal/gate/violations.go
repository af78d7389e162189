// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
)

// A violation is something that a hermetic step may not do.
type violation struct {
	// Kind is "listen", "packets", "exception" (an expired one) or the kind of an event of the sandbox: "connect".
	Kind string `json:"kind"`
	// Host is the host that the step tried to reach, "" for listeners.
	Host    string `json:"host,omitempty"`
	Subject string `json:"subject"`
	Process string `json:"process,omitempty"`
	Syscall string `json:"syscall,omitempty"`
	Count   int    `json:"count"`
	Text    string `json:"text"`
}

// A use is an exception of a step, with the number of connections that it authorised.
type use struct {
	Host    string `json:"host"`
	Port    uint16 `json:"port"`
	Owner   string `json:"owner"`
	Reason  string `json:"reason"`
	Expires string `json:"expires"`
	Line    int    `json:"line"` // in the policy
	// Connections counts all connections, Failed those that the endpoint did not accept.
	Connections int `json:"connections"`
	Failed      int `json:"failed"`
}

// harmless are the kinds of events that do not concern the network. Every other kind does.
var harmless = []sandbox.EventKind{
	sandbox.EventWrite, sandbox.EventExec, sandbox.EventRead, sandbox.EventOutput, sandbox.EventLimit, sandbox.EventRefused,
}

// local are the refused sockets that cannot reach another host.
var local = []string{"socket(AF_ALG)", "socket(AF_NETLINK", "socketpair("}

// classify returns the kind of violation that an event is, or "" if it is none.
func classify(e *sandbox.Event) string {
	switch {
	case slices.Contains(harmless, e.Kind), e.Kind == sandbox.EventAllowed, e.Kind == sandbox.EventUnreachable:
		return ""
	case e.Kind != sandbox.EventSyscall:
		return string(e.Kind)
	case e.Subject != "listen(unix)" && strings.HasPrefix(e.Subject, "listen") || strings.HasPrefix(e.Subject, "bind(udp"):
		return "listen"
	case slices.ContainsFunc(local, func(l string) bool { return strings.HasPrefix(e.Subject, l) }):
		return ""
	case strings.HasPrefix(e.Subject, "socket("):
		return string(sandbox.EventConnect)
	}
	return ""
}

// findings is what a run shows about a step.
type findings struct {
	violations []violation
	uses       []use
	denied     []string // that concern no network
}

// find returns the findings about a step from its result, or those before it runs if r is nil.
func (s *step) find(r *sandbox.Result, policy string, today time.Time) *findings {
	f := &findings{violations: []violation{}, uses: []use{}}
	for _, e := range slices.Concat(s.hosts, s.ports) {
		if e.expired(today) {
			text := fmt.Sprintf("exception for %s (owner %s) expired after %s (%s:%d): renew or remove it",
				e.name(), e.owner, e.expires.Format(time.DateOnly), policy, e.line)
			f.violations = append(f.violations,
				violation{Kind: "exception", Host: e.host, Subject: e.name(), Count: 1, Text: text})
		}
	}
	for _, to := range s.endpoints(today) {
		i := slices.IndexFunc(s.hosts, func(e *exception) bool { return e.host == to.Host })
		e := s.hosts[i]
		f.uses = append(f.uses, use{
			Host: to.Host, Port: to.Port, Owner: e.owner, Reason: e.reason, Expires: e.expires.Format(time.DateOnly), Line: e.line,
		})
	}
	if r == nil {
		return f
	}
	network := false
	for _, e := range worker.NewViolations(r, workDir).Events {
		kind := classify(&e)
		authorises := func(u use) bool { return u.Host == e.Endpoint.Host && u.Port == e.Endpoint.Port }
		switch i := slices.IndexFunc(f.uses, authorises); {
		case kind != "":
			network = network || kind != "listen"
			v := violation{
				Kind: kind, Subject: e.Subject, Process: e.Process, Syscall: e.Syscall, Count: e.Count, Text: e.String(),
			}
			if kind != "listen" {
				v.Host = cmp.Or(e.Endpoint.Host, strings.TrimPrefix(e.Subject, "dns ")) // of a lookup
			}
			f.violations = append(f.violations, v)
		case i >= 0 && (e.Kind == sandbox.EventAllowed || e.Kind == sandbox.EventUnreachable):
			f.uses[i].Connections += e.Count
			if e.Kind == sandbox.EventUnreachable {
				f.uses[i].Failed += e.Count
			}
		case r.Exceeded != nil && e.String() == r.Exceeded.String(): // the message names it
		case e.Kind != sandbox.EventOutput:
			f.denied = append(f.denied, e.String())
		}
	}
	if r.Usage.PacketsRefused > 0 && !network {
		f.violations = append(f.violations, violation{
			Kind: "packets", Host: "unknown", Subject: "packets", Count: 1,
			Text: "denied: packets to unknown hosts (counted by the kernel)",
		})
	}
	slices.SortStableFunc(f.violations, func(a, b violation) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Process, b.Process))
	})
	return f
}
