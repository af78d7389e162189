// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"errors"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
)

func TestEventString(t *testing.T) {
	for want, e := range map[string]sandbox.Event{
		"tried to write /x: not an output (sh, openat)": {Kind: sandbox.EventWrite, Subject: "/x", Syscall: "openat", Process: "sh"},
		"tried to write /x: the directory is shut":      {Kind: sandbox.EventWrite, Subject: "/x", Detail: "the directory is shut"},
		"tried to execute cc: not in the sandbox, the environment has no PATH": {
			Kind: sandbox.EventExec, Subject: "cc", Detail: "the environment has no PATH",
		},
		"memory 4.0 GiB of 4.0 GiB": {Kind: sandbox.EventLimit, Subject: "memory", Actual: "4.0 GiB", Limit: "4.0 GiB", Unit: "bytes"},
	} {
		if got := e.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestEndpointString(t *testing.T) {
	for want, e := range map[string]sandbox.Endpoint{
		"example.org:443":   {Host: "example.org", Port: 443},
		"192.0.2.1:80":      {Host: "192.0.2.1", Port: 80},
		"[2001:db8::1]:443": {Host: "2001:db8::1", Port: 443},
	} {
		if got := e.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestLimitsByName(t *testing.T) {
	units := map[sandbox.Limit]string{sandbox.LimitMemory: "bytes", sandbox.LimitOutputBytes: "bytes", sandbox.LimitCPU: "ns"}
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
