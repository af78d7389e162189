// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"strconv"
	"time"
)

// Unlimited is the value of a limit that is not enforced. A limit of zero is an error, so that none is unlimited by
// omission.
const Unlimited = -1

// Limits bound what all processes of one run may use together. Each is positive or Unlimited.
type Limits struct {
	// Memory is in bytes and includes files written into memory.
	Memory int64
	// CPU is processor time.
	CPU time.Duration
	// Processes counts processes and threads.
	Processes int64
	// OpenFiles counts the descriptors of each process.
	OpenFiles int64
	// OutputBytes and OutputFiles bound the contents of the outputs; directories and links count as files.
	OutputBytes int64
	OutputFiles int64
	// MilliCPUs is in thousandths of a processor: 1500 are one and a half. The kernel delays a run that uses more.
	MilliCPUs int64
	// DiskRate is in bytes per second, for reads from each disk and for writes to it. What is in memory does not count.
	DiskRate int64
}

// A Limit names one of the Limits.
type Limit string

// The limits.
const (
	LimitMemory      Limit = "memory"
	LimitCPU         Limit = "CPU time"
	LimitProcesses   Limit = "processes"
	LimitOpenFiles   Limit = "open files"
	LimitOutputBytes Limit = "output bytes"
	LimitOutputFiles Limit = "output files"
	LimitMilliCPUs   Limit = "processors"
	LimitDiskRate    Limit = "disk rate"
)

// AllLimits are the limits, in the order of the fields of Limits.
var AllLimits = []Limit{LimitMemory, LimitCPU, LimitProcesses, LimitOpenFiles, LimitOutputBytes, LimitOutputFiles, LimitMilliCPUs, LimitDiskRate}

// DefaultLimits returns limits for a build action. The number of processors and the disk rate are Unlimited.
func DefaultLimits() Limits {
	return Limits{
		Memory:      4 << 30,
		CPU:         time.Hour,
		Processes:   128,
		OpenFiles:   4096,
		OutputBytes: 16 << 30,
		OutputFiles: 1_000_000,
		MilliCPUs:   Unlimited,
		DiskRate:    Unlimited,
	}
}

// at returns the field that l names; nil for CPU, which is a duration, and for unknown limits.
func (ls *Limits) at(l Limit) *int64 {
	switch l {
	case LimitMemory:
		return &ls.Memory
	case LimitProcesses:
		return &ls.Processes
	case LimitOpenFiles:
		return &ls.OpenFiles
	case LimitOutputBytes:
		return &ls.OutputBytes
	case LimitOutputFiles:
		return &ls.OutputFiles
	case LimitMilliCPUs:
		return &ls.MilliCPUs
	case LimitDiskRate:
		return &ls.DiskRate
	}
	return nil
}

// Of returns the value of one limit, in its Unit, and 0 for an unknown one.
func (ls *Limits) Of(l Limit) int64 {
	if l == LimitCPU {
		return int64(ls.CPU)
	}
	if v := ls.at(l); v != nil {
		return *v
	}
	return 0
}

// Set changes the value of one limit. It ignores an unknown one.
func (ls *Limits) Set(l Limit, v int64) {
	if l == LimitCPU {
		ls.CPU = time.Duration(v)
	} else if field := ls.at(l); field != nil {
		*field = v
	}
}

// Unit returns the unit of the limit's values: "bytes", "ns", "millicpus", "bytes/s", or "" for a count.
func (l Limit) Unit() string {
	switch l {
	case LimitMemory, LimitOutputBytes:
		return "bytes"
	case LimitCPU:
		return "ns"
	case LimitMilliCPUs:
		return "millicpus"
	case LimitDiskRate:
		return "bytes/s"
	}
	return ""
}

// Format returns a value of the limit for people: "4.0 GiB", "1h0m0s", "1.5", "128".
func (l Limit) Format(v int64) string {
	if v == Unlimited {
		return "unlimited"
	}
	switch l.Unit() {
	case "bytes":
		return Bytes(v)
	case "bytes/s":
		return Bytes(v) + "/s"
	case "ns":
		return time.Duration(v).String()
	case "millicpus":
		return strconv.FormatFloat(float64(v)/1000, 'f', -1, 64)
	}
	return fmt.Sprint(v)
}

// Bytes formats a number of bytes for people: "512 B", "4.0 GiB".
func Bytes(n int64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n), ""
	for _, unit = range []string{"KiB", "MiB", "GiB", "TiB"} {
		if v /= 1 << 10; v < 1<<10 {
			break
		}
	}
	return fmt.Sprintf("%.1f %s", v, unit)
}

func (ls *Limits) validate() error {
	for _, l := range AllLimits {
		if v := ls.Of(l); v <= 0 && v != Unlimited {
			return fmt.Errorf("the limit of %s is %d: it must be positive or Unlimited", l, v)
		}
	}
	return nil
}
