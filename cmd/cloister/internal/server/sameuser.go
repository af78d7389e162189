// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/cas"
)

// operator returns an error unless r may use the services of operators. Without access rules these are for root and the
// user of the server, as its control socket is: other users of the machine reach the port, too.
func (s *server) operator(r *http.Request) error {
	if s.Auth.rules != nil {
		return nil // they decide
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err == nil && local != nil {
		for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
			if uid, ok := socketUser(table, from, local.AddrPort()); ok && (uid == 0 || uid == os.Getuid()) {
				return nil
			}
		}
	}
	return fmt.Errorf("%w: without --auth only the user who runs the server may see this, with a browser on the same machine", cas.ErrDenied)
}

// socketUser returns the user of the established connection that has these addresses at its two ends, from a table of
// Linux, whose lines are "N: LOCAL REMOTE STATE QUEUES TIMER RETRIES UID ...".
func socketUser(table string, local, remote netip.AddrPort) (uid int, ok bool) {
	file, err := os.Open(table)
	if err != nil {
		return 0, false
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) < 8 || f[3] != "01" || !same(f[1], local) || !same(f[2], remote) {
			continue
		}
		uid, err := strconv.Atoi(f[7])
		return uid, err == nil
	}
	return 0, false
}

// same reports whether text is an address as /proc/net has it: words of 32 bits in the byte order of the machine.
func same(text string, a netip.AddrPort) bool {
	address, port, _ := strings.Cut(text, ":")
	var b []byte
	for ; len(address) >= 8; address = address[8:] {
		word, err := strconv.ParseUint(address[:8], 16, 32)
		if err != nil {
			return false
		}
		b = binary.NativeEndian.AppendUint32(b, uint32(word))
	}
	ip, ok := netip.AddrFromSlice(b)
	p, err := strconv.ParseUint(port, 16, 16)
	return ok && err == nil && ip.Unmap() == a.Addr().Unmap().WithZone("") && uint16(p) == a.Port()
}
