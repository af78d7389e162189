// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"errors"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
)

func TestEventString(t *testing.T) {
	for want, e := range map[string]sandbox.Event{
		"denied: write to input gen/in.tmp (read-only)":              {Kind: sandbox.EventWrite, Subject: "gen/in.tmp", Count: 1},
		"denied: write to /x (read-only) by sh (openat), 2 times":    {Kind: sandbox.EventWrite, Subject: "/x", Syscall: "openat", Process: "sh", Count: 2},
		"denied: write to x/y (the directory is shut)":               {Kind: sandbox.EventWrite, Subject: "x/y", Detail: "the directory is shut"},
		"warning: undeclared output discarded: tmp.txt":              {Kind: sandbox.EventOutput, Subject: "tmp.txt", Count: 1},
		"reached the limit of memory: 4.0 GiB of 4.0 GiB":            {Kind: sandbox.EventLimit, Subject: "memory", Actual: "4.0 GiB", Limit: "4.0 GiB", Unit: "bytes"},
		"denied: system call mount by sh":                            {Kind: sandbox.EventSyscall, Subject: "mount", Syscall: "mount", Process: "sh"},
		"denied: connection to unix @bus (no network)":               {Kind: sandbox.EventConnect, Subject: "unix @bus"},
		"failed: connection to 192.0.2.1:80, which is permitted; no": {Kind: sandbox.EventUnreachable, Subject: "192.0.2.1:80", Detail: "no"},
		"denied: read of a.h (not an input) by cc1 (openat); add it": {
			Kind: sandbox.EventRead, Subject: "a.h", Syscall: "openat", Process: "cc1", Detail: "add it",
		},
		"denied: connection to tcp 192.0.2.1:80 (no network) by curl (connect); add what it needs to the inputs, or allow the endpoint in the policy": {
			Kind: sandbox.EventConnect, Subject: "tcp 192.0.2.1:80", Syscall: "connect", Process: "curl",
		},
		"failed: connection to 127.0.0.1:80 by sh (connect); nothing": {
			Kind: sandbox.EventUnreachable, Subject: "127.0.0.1:80", Syscall: "connect", Process: "sh", Detail: "nothing",
		},
		"denied: lookup of example.com (curl): no network access, 2 times; add what it needs to the inputs, or allow the endpoint in the policy": {
			Kind: sandbox.EventConnect, Subject: "dns example.com", Process: "curl", Count: 2, Detail: "A, AAAA",
		},
		"failed: execution of cc (not in the sandbox); the environment has no PATH": {
			Kind: sandbox.EventExec, Subject: "cc", Detail: "the environment has no PATH",
		},
	} {
		expect.Equal(t, e.String(), want)
	}
}

func TestEndpointString(t *testing.T) {
	for want, e := range map[string]sandbox.Endpoint{
		"example.org:443":   {Host: "example.org", Port: 443},
		"192.0.2.1:80":      {Host: "192.0.2.1", Port: 80},
		"[2001:db8::1]:443": {Host: "2001:db8::1", Port: 443},
	} {
		expect.Equal(t, e.String(), want)
	}
}

func TestLimitsByName(t *testing.T) {
	units := map[sandbox.Limit]string{
		sandbox.LimitMemory: "bytes", sandbox.LimitOutputBytes: "bytes", sandbox.LimitCPU: "ns", sandbox.LimitMilliCPUs: "millicpus", sandbox.LimitDiskRate: "bytes/s",
	}
	for i, l := range sandbox.AllLimits {
		var limits sandbox.Limits
		limits.Set(l, int64(i+1))
		if got := limits.Of(l); got != int64(i+1) || l.Unit() != units[l] {
			t.Errorf("%s: got %d %q, want %d %q", l, got, l.Unit(), i+1, units[l])
		}
	}
	var limits sandbox.Limits
	limits.Set("unknown", 1)
	if got := limits.Of("unknown"); got != 0 || limits != (sandbox.Limits{}) {
		t.Errorf("unknown limit: got %d, %+v, want 0 and no change", got, limits)
	}
}

func TestNilSpecIsNotCovered(t *testing.T) {
	if err := new(sandbox.Features).Covers(nil); !errors.Is(err, sandbox.ErrSpec) {
		t.Errorf("got error %v, want ErrSpec", err)
	}
}
