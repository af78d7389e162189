// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// A kind is how amounts are written, and the largest that there may be: more is a mistake, and somewhere on
// its way to the kernel it might become too little.
type kind struct {
	parse  func(string) (int64, error)
	format func(int64) string
	most   int64
}

var (
	sizes     = kind{parseSize, formatSize, 1 << 50}
	counts    = kind{parseCount, formatCount, 1 << 30}
	durations = kind{parseDuration, func(v int64) string { return formatDuration(time.Duration(v)) }, int64(10 * 365 * 24 * time.Hour)}
)

// A quantity is an amount of something. Files, max and properties all state it in the same way.
type quantity struct {
	key   string        // in a file
	limit sandbox.Limit // "" for the size of /tmp, which is none
	kind
	least int64 // with less, hardly a command could begin
}

// quantities are all of them, the limits in the order of sandbox.AllLimits.
var quantities = [...]quantity{
	{"memory", sandbox.LimitMemory, sizes, 16 << 20},
	{"cpu", sandbox.LimitCPU, durations, 1},
	{"processes", sandbox.LimitProcesses, counts, 1},
	{"open_files", sandbox.LimitOpenFiles, counts, 16},
	{"output_bytes", sandbox.LimitOutputBytes, sizes, 1},
	{"output_files", sandbox.LimitOutputFiles, counts, 1},
	{"tmp", "", sizes, 1 << 20},
}

// maxTimeout is what max_timeout is written like. It is no quantity: no action asks for it.
var maxTimeout = quantity{key: "max_timeout", kind: durations, least: 1}

// read returns the amount that s states, which is neither too little nor too much.
func (q *quantity) read(s string) (int64, error) {
	v, err := q.parse(s)
	switch {
	case err != nil:
		return 0, err
	case v < q.least:
		return 0, fmt.Errorf("%q is too little: at least %s is permitted", s, q.format(q.least))
	case v > q.most:
		return 0, fmt.Errorf("%q is too much: at most %s is permitted", s, q.format(q.most))
	}
	return v, nil
}

func index(key string) int {
	return slices.IndexFunc(quantities[:], func(q quantity) bool { return q.key == key })
}

// property returns the name of the quantity as a property of an action, without the prefix.
func (q *quantity) property() string { return strings.ReplaceAll(q.key, "_", "-") }

var units = []struct {
	name  string
	bytes int64
}{
	{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
	{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"B", 1},
}

func parseSize(s string) (int64, error) {
	for _, u := range units {
		number, ok := strings.CutSuffix(s, u.name)
		if !ok {
			continue
		}
		n, err := parseCount(strings.TrimSuffix(number, " "))
		if err != nil || n > math.MaxInt64/u.bytes {
			break
		}
		return n * u.bytes, nil
	}
	return 0, fmt.Errorf("%q is no size: write a whole number with a unit, as 4GiB or 512MiB", s)
}

// formatSize loses nothing: what it returns is parsed to the same number.
func formatSize(v int64) string {
	i := 0
	for v%units[i].bytes != 0 {
		i++ // to bytes at last, which divide everything
	}
	return formatCount(v/units[i].bytes) + units[i].name
}

func parseDuration(s string) (int64, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("%q is no time: write a number with a unit, as 1h or 90s", s)
	}
	return int64(d), nil
}

// formatDuration omits the zeros of Duration.String: "1h" for "1h0m0s".
func formatDuration(d time.Duration) string {
	s := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(s, zero) {
			s = s[:len(s)-2]
		}
	}
	return s
}

func parseCount(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("%q is no number: write a whole number of at least 1", s)
	}
	return n, nil
}

func formatCount(v int64) string { return strconv.FormatInt(v, 10) }

func parseBool(s string) (bool, error) {
	if s != "true" && s != "false" {
		return false, fmt.Errorf("%q is neither true nor false", s)
	}
	return s == "true", nil
}

// audits are the degrees of watching, from the loosest to the closest.
var audits = []sandbox.Audit{sandbox.AuditOff, sandbox.AuditViolations, sandbox.AuditFull}

func parseAudit(s string) (sandbox.Audit, error) {
	i := slices.IndexFunc(audits, func(a sandbox.Audit) bool { return formatAudit(a) == s })
	if i < 0 {
		return "", fmt.Errorf("%q is none of off, attempts and full", s)
	}
	return audits[i], nil
}

func formatAudit(a sandbox.Audit) string {
	if a == sandbox.AuditViolations {
		return "attempts"
	}
	return string(a)
}

// sortedOnce sorts endpoints as a Spec wants them.
func sortedOnce(es []sandbox.Endpoint) []sandbox.Endpoint {
	slices.SortFunc(es, func(a, b sandbox.Endpoint) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(es)
}
