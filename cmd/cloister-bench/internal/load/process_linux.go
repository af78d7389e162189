// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// tick is the unit of CPU time in /proc.
const tick = time.Second / 100

// flush writes the dirty pages of all file systems.
func flush() { syscall.Sync() }

// usageOf returns the usage of a process without its children.
func usageOf(pid int) (usage, error) {
	p, err := processOf(pid)
	if err != nil {
		return usage{}, err
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return usage{}, err
	}
	_, peak, _ := strings.Cut(string(status), "\nVmHWM:")
	peak, _, _ = strings.Cut(peak, " kB\n")
	n, err := strconv.ParseInt(strings.TrimSpace(peak), 10, 64)
	return usage{p.cpu, n << 10}, err
}

// A process is the part of /proc/PID/stat in use here.
type process struct {
	parent int
	cpu    time.Duration
	exited time.Duration // CPU time of descendants that exited and were waited for
}

func processOf(pid int) (process, error) {
	file := fmt.Sprintf("/proc/%d/stat", pid)
	stat, err := os.ReadFile(file)
	if err != nil {
		return process{}, err
	}
	// The program's name, in parentheses, may contain any character, so the fields count from its end.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	numbers := make([]int64, 15)
	for _, i := range []int{1, 11, 12, 13, 14} { // ppid, utime, stime, cutime, cstime
		if i >= len(fields) {
			return process{}, fmt.Errorf("%s is malformed", file)
		}
		if numbers[i], err = strconv.ParseInt(fields[i], 10, 64); err != nil {
			return process{}, fmt.Errorf("%s is malformed: %w", file, err)
		}
	}
	return process{
		parent: int(numbers[1]),
		cpu:    time.Duration(numbers[11]+numbers[12]) * tick,
		exited: time.Duration(numbers[13]+numbers[14]) * tick,
	}, nil
}

// treeCPU returns the CPU time of processes and their live descendants, and that of descendants that exited and were
// waited for.
func treeCPU(pids []int) (live, exited time.Duration, err error) {
	if len(pids) == 0 {
		return 0, 0, nil
	}
	names, err := os.ReadDir("/proc")
	if err != nil {
		return 0, 0, err
	}
	all := map[int]process{}
	for _, name := range names {
		pid, err := strconv.Atoi(name.Name())
		if err != nil {
			continue
		}
		p, err := processOf(pid)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // it exited meanwhile
		} else if err != nil {
			return 0, 0, err
		}
		all[pid] = p
	}
	for pid, p := range all {
		for at := pid; at != 0; at = all[at].parent {
			if slices.Contains(pids, at) {
				live, exited = live+p.cpu, exited+p.exited
				break
			}
		}
	}
	return live, exited, nil
}

// machineCPU returns the busy time of all processors, including time stolen from a virtual machine.
func machineCPU() (time.Duration, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(stat), "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, errors.New("/proc/stat is malformed")
	}
	var busy time.Duration
	for i, field := range fields[1:9] { // user, nice, system, idle, iowait, irq, softirq, steal
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat is malformed: %w", err)
		}
		if i != 3 && i != 4 {
			busy += time.Duration(n) * tick
		}
	}
	return busy, nil
}

// ownCPU returns the CPU time of this process, and of its exited children.
func ownCPU() (self, children time.Duration) {
	p, err := processOf(os.Getpid())
	if err != nil {
		return 0, 0
	}
	return p.cpu, p.exited
}
