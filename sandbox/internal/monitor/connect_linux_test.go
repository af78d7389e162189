// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"golang.org/x/sys/unix"
)

func TestAddresses(t *testing.T) {
	for name, c := range map[string]struct{ raw, endpoint, path string }{
		"empty":        {raw: ""},
		"short family": {raw: "\x02"},
		"unspecified":  {raw: "\x00\x00\x01\xbb\x0a\x00\x00\x01________"},
		"ipv4":         {raw: "\x02\x00\x01\xbb\x0a\x00\x00\x01________", endpoint: "10.0.0.1:443"},
		"short ipv4":   {raw: "\x02\x00\x01\xbb\x0a\x00\x00\x01___"},
		"ipv6":         {raw: "\x0a\x00\x00\x35____\xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01", endpoint: "[fd00::1]:53"},
		"mapped":       {raw: "\x0a\x00\x00\x35____\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x0a\x00\x00\x01", endpoint: "10.0.0.1:53"},
		"short ipv6":   {raw: "\x0a\x00\x00\x35____\xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"},
		"unix":         {raw: "\x01\x00/run/x.sock\x00junk", path: "/run/x.sock"},
		"unclean unix": {raw: "\x01\x00/tmp/../run//x.sock", path: "/run/x.sock"},
		"abstract":     {raw: "\x01\x00\x00/run/x.sock"},
		"relative":     {raw: "\x01\x00run/x.sock"},
		"unnamed":      {raw: "\x01\x00"},
	} {
		to, ok := endpoint([]byte(c.raw))
		got := ""
		if ok {
			got = to.String()
		}
		if p, _ := socketPath([]byte(c.raw)); got != c.endpoint || p != c.path {
			t.Errorf("%s: got %q and %q, want %q and %q", name, got, p, c.endpoint, c.path)
		}
	}
}

func FuzzAddress(f *testing.F) {
	f.Add([]byte("\x02\x00\x01\xbb\x0a\x00\x00\x01________"))
	f.Add([]byte("\x01\x00/run/x.sock\x00junk"))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, isIP := endpoint(b)
		p, isPath := socketPath(b)
		if isIP && isPath || isPath && p[0] != '/' {
			t.Errorf("%t, %t, %q", isIP, isPath, p)
		}
	})
}

func TestDatagramSocketsMayAsk(t *testing.T) {
	for _, c := range []struct {
		args [6]uint64
		want bool
	}{
		{[6]uint64{unix.AF_INET, unix.SOCK_DGRAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK}, true},
		{[6]uint64{1<<32 | unix.AF_INET6, 1<<32 | unix.SOCK_DGRAM}, true}, // the kernel reads an int
		{[6]uint64{unix.AF_INET, unix.SOCK_STREAM}, false},
		{[6]uint64{1<<32 | unix.AF_NETLINK, unix.SOCK_DGRAM}, false},
	} {
		expect.Equal(t, mayAsk(c.args), c.want, "%x", c.args)
	}
}

func TestSocketsAreDescribed(t *testing.T) {
	for want, args := range map[string][6]uint64{
		"AF_VSOCK":               {unix.AF_VSOCK, unix.SOCK_STREAM},
		"AF_INET, SOCK_RAW":      {1<<32 | unix.AF_INET, unix.SOCK_RAW | unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP},
		"AF_INET6, protocol 132": {unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_SCTP},
		"AF_INET, type 10":       {unix.AF_INET, unix.SOCK_PACKET},
		"AF_NETLINK, protocol 9": {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT},
		"77":                     {77, unix.SOCK_STREAM},
	} {
		expect.Equal(t, family(args), want)
	}
}
