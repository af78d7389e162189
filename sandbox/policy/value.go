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

// A kind is a notation for amounts. Its maximum is far above every sensible value, so that none overflows on its way to
// the kernel.
type kind struct {
	parse  func(string) (int64, error)
	format func(int64) string
	max    int64
}

var (
	sizes     = kind{parseSize, formatSize, 1 << 50}
	counts    = kind{parseCount, formatCount, 1 << 30}
	cpus      = kind{parseCPUs, sandbox.LimitMilliCPUs.Format, 1e6}
	rates     = kind{parseRate, func(v int64) string { return formatSize(v) + perSecond }, sizes.max}
	durations = kind{parseDuration, func(v int64) string { return formatDuration(time.Duration(v)) }, int64(10 * 365 * 24 * time.Hour)}
)

// A quantity is an amount with the same notation in profiles, max and properties.
type quantity struct {
	key   string        // in a file
	limit sandbox.Limit // "" for the size of /tmp
	kind
	min int64 // below it hardly any command could start
}

// quantities are all quantities, the limits in the order of sandbox.AllLimits.
var quantities = [...]quantity{
	{"memory", sandbox.LimitMemory, sizes, 16 << 20},
	{"cpu", sandbox.LimitCPU, durations, 1},
	{"processes", sandbox.LimitProcesses, counts, 1},
	{"open_files", sandbox.LimitOpenFiles, counts, 16},
	{"output_bytes", sandbox.LimitOutputBytes, sizes, 1},
	{"output_files", sandbox.LimitOutputFiles, counts, 1},
	{"cpus", sandbox.LimitMilliCPUs, cpus, 10}, // the kernel's minimum is 1 ms in each period of 100 ms
	{"disk_rate", sandbox.LimitDiskRate, rates, 1 << 10},
	{"tmp", "", sizes, 1 << 20},
}

// maxTimeout is the notation of max_timeout. It is not in quantities, because actions cannot request it.
var maxTimeout = quantity{key: "max_timeout", kind: durations, min: 1}

// read parses an amount and checks its range.
func (q *quantity) read(s string) (int64, error) {
	v, err := q.parse(s)
	switch {
	case err != nil:
		return 0, err
	case v < q.min:
		return 0, fmt.Errorf("%q is too small: the minimum is %s", s, q.format(q.min))
	case v > q.max:
		return 0, fmt.Errorf("%q is too large: the maximum is %s", s, q.format(q.max))
	}
	return v, nil
}

// property returns the name of the quantity as a platform property, without the prefix.
func (q *quantity) property() string { return strings.ReplaceAll(q.key, "_", "-") }

// limitProperty is Grant.Ask. It returns the zero Property for an unknown limit.
func limitProperty(l sandbox.Limit, v int64) Property {
	i := slices.IndexFunc(quantities[:], func(q quantity) bool { return q.limit == l })
	if i < 0 {
		return Property{}
	}
	return Property{prefix + quantities[i].property(), quantities[i].format(v)}
}

var units = []struct {
	name  string
	bytes int64
}{
	{"TiB", 1 << 40},
	{"GiB", 1 << 30},
	{"MiB", 1 << 20},
	{"KiB", 1 << 10},
	{"TB", 1e12},
	{"GB", 1e9},
	{"MB", 1e6},
	{"kB", 1e3},
	{"B", 1},
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
	return 0, fmt.Errorf("invalid size %q: write a whole number with a unit, such as 4GiB or 512MiB", s)
}

// formatSize is the inverse of parseSize.
func formatSize(v int64) string {
	i := 0
	for v%units[i].bytes != 0 {
		i++ // at the latest to bytes
	}
	return formatCount(v/units[i].bytes) + units[i].name
}

const perSecond = "/s"

func parseRate(s string) (int64, error) {
	size, ok := strings.CutSuffix(s, perSecond)
	n, err := parseSize(size)
	if !ok || err != nil {
		return 0, fmt.Errorf("invalid rate %q: write a size per second, such as 50MiB/s", s)
	}
	return n, nil
}

func parseDuration(s string) (int64, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("invalid duration %q: write a number with a unit, such as 1h or 90s", s)
	}
	return int64(d), nil
}

// formatDuration is Duration.String without trailing zeros: "1h" for "1h0m0s".
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
		return 0, fmt.Errorf("invalid number %q: write a whole number of at least 1", s)
	}
	return n, nil
}

// parseCPUs returns thousandths of a processor.
func parseCPUs(s string) (int64, error) {
	whole, part, _ := strings.Cut(s, ".")
	n, err := strconv.ParseUint(whole+(part + "000")[:3], 10, 31)
	if err != nil || whole == "" || len(part) > 3 || strings.HasSuffix(s, ".") {
		return 0, fmt.Errorf("invalid number of processors %q: write a number with at most three decimals, such as 2 or 1.5", s)
	}
	return int64(n), nil
}

func formatCount(v int64) string { return strconv.FormatInt(v, 10) }

func parseBool(s string) (bool, error) {
	if s != "true" && s != "false" {
		return false, fmt.Errorf("invalid value %q: write true or false", s)
	}
	return s == "true", nil
}

// audits are the audit levels, in ascending order.
var audits = []sandbox.Audit{sandbox.AuditOff, sandbox.AuditViolations, sandbox.AuditFull}

func parseAudit(s string) (sandbox.Audit, error) {
	i := slices.IndexFunc(audits, func(a sandbox.Audit) bool { return a.String() == s })
	if i < 0 {
		return "", fmt.Errorf("invalid audit level %q: write off, attempts or full", s)
	}
	return audits[i], nil
}

// sortEndpoints sorts endpoints as a Spec needs them, and removes duplicates.
func sortEndpoints(es []sandbox.Endpoint) []sandbox.Endpoint {
	slices.SortFunc(es, func(a, b sandbox.Endpoint) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(es)
}
