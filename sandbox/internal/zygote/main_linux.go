// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// init turns the process into the zygote, into pid 1 of a run or into a probe, if it was started as
// one; then it never returns.
func init() {
	switch os.Args[0] {
	case nameZygote:
		zygoteMain()
	case nameInit:
		initMain()
	case NameProbe:
		probeMain()
	default:
		return
	}
	os.Exit(0)
}

// probeMain prints the Facts of the sandbox that this process runs in.
func probeMain() {
	var f Facts
	f.UID, f.GID, f.PID = os.Getuid(), os.Getgid(), os.Getpid()
	f.Hostname, _ = os.Hostname()
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "CapEff:"); ok {
			f.Capabilities = strings.TrimSpace(v)
		}
	}
	nnp, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	f.NoNewPrivs = err == nil && nnp == 1
	ifs, _ := net.Interfaces()
	for _, i := range ifs {
		f.Interfaces = append(f.Interfaces, i.Name)
	}
	if file, err := os.OpenFile("/probe-write", os.O_CREATE|os.O_WRONLY, 0o600); err == nil {
		f.RootWritable = true
		file.Close()
	}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err == nil {
			f.Processes++
		}
	}
	if l, err := net.Listen("tcp", "127.0.0.1:0"); err == nil {
		if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
			f.Loopback = true
			c.Close()
		}
		l.Close()
	}
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
