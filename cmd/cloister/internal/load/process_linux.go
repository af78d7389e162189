// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the unit in which Linux tells a process' CPU time.
const tick = time.Second / 100

// usageOf returns what a process has used. Its children are not part of it.
func usageOf(pid int) (usage, error) {
	dir := "/proc/" + strconv.Itoa(pid)
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return usage{}, err
	}
	// The name of the program, in parentheses, may have any character; fields count from behind it.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	var u usage
	for _, i := range []int{11, 12} { // utime, stime
		if i >= len(fields) {
			return usage{}, fmt.Errorf("%s/stat is malformed", dir)
		}
		n, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return usage{}, fmt.Errorf("%s/stat is malformed: %w", dir, err)
		}
		u.cpu += time.Duration(n) * tick
	}
	status, err := os.ReadFile(dir + "/status")
	if err != nil {
		return usage{}, err
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		switch name {
		case "VmHWM":
			u.peak = n << 10
		case "RssAnon":
			u.anonymous = n << 10
		}
	}
	return u, nil
}
