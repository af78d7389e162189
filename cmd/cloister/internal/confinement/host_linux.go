// SPDX-License-Identifier: Apache-2.0

package confinement

import (
	"math"
	"os"
	"path"
	"runtime"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/sandbox/policy"
	"golang.org/x/sys/unix"
)

// thisHost describes this machine. Fields that cannot be read are zero.
func thisHost() policy.Host {
	h := policy.Host{CPUs: runtime.NumCPU(), Memory: memory()}
	if n := min(number("/proc/sys/kernel/threads-max"), number("/proc/sys/kernel/pid_max")); n < math.MaxInt64 {
		h.Threads = n
	}
	var files unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &files) == nil {
		h.OpenFiles = int64(min(files.Max/2, 1<<30)) // the sandbox grants at most half
	}
	return h
}

// memory returns the memory of this machine, or memory.max of a control group of this process if that is less, in
// bytes, rounded down to whole MiB; 0 if it is unknown.
func memory() int64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	least := int64(uint64(info.Totalram) * uint64(info.Unit))
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		groups = nil // this kernel has none
	}
	for line := range strings.Lines(string(groups)) {
		dir, v2 := strings.CutPrefix(strings.TrimSpace(line), "0::")
		for ; v2; dir = path.Dir(dir) {
			least = min(least, number(path.Join("/sys/fs/cgroup", dir, "memory.max")))
			if dir == "/" || dir == "." {
				break
			}
		}
	}
	return least &^ (1<<20 - 1)
}

// number returns the number in a file, or MaxInt64 if there is none.
func number(file string) int64 {
	text, err := os.ReadFile(file)
	if err != nil {
		return math.MaxInt64
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return math.MaxInt64
	}
	return n
}
