// SPDX-License-Identifier: Apache-2.0

// Package flags defines the value types of command-line flags, such as sizes, durations and percentages, and explains
// mistakes in a command line.
package flags

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// Size is a flag of a number of bytes: "50GiB", "500MB", "1048576", or "10%" of a disk.
type Size struct {
	Bytes   int64
	Percent int64 // of the disk, if Bytes is 0
}

var units = []struct {
	suffix string
	bytes  int64
}{
	{"KiB", 1 << 10},
	{"MiB", 1 << 20},
	{"GiB", 1 << 30},
	{"TiB", 1 << 40},
	{"kB", 1e3},
	{"KB", 1e3},
	{"MB", 1e6},
	{"GB", 1e9},
	{"TB", 1e12},
	{"K", 1 << 10},
	{"M", 1 << 20},
	{"G", 1 << 30},
	{"T", 1 << 40},
	{"B", 1},
}

// Set implements pflag.Value.
func (s *Size) Set(text string) error {
	if p, ok := strings.CutSuffix(text, "%"); ok {
		n, err := strconv.ParseInt(p, 10, 64)
		if err != nil || n < 1 || n > 100 {
			return errors.New("write a whole percentage of the disk, from 1% to 100%")
		}
		*s = Size{Percent: n}
		return nil
	}
	n, ok := parseBytes(text)
	if !ok {
		return errors.New("write 50GiB, 500MB or 10%")
	}
	if _, err := strconv.Atoi(text); err == nil && n < 1<<20 {
		return fmt.Errorf("%d bytes are too few: write a unit, such as %sGiB, or a percentage of the disk, such as %[2]s%%", n, text)
	}
	*s = Size{Bytes: n}
	return nil
}

// parseBytes parses a positive number of bytes.
func parseBytes(text string) (int64, bool) {
	number, unit := text, int64(1)
	for _, u := range units {
		if n, ok := strings.CutSuffix(text, u.suffix); ok {
			number, unit = n, u.bytes
			break
		}
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	n *= float64(unit)
	if err != nil || !(n >= 1 && n < math.MaxInt64) { // also rejects NaN
		return 0, false
	}
	return int64(n), true
}

// String implements pflag.Value.
func (s *Size) String() string {
	if s.Percent > 0 {
		return strconv.FormatInt(s.Percent, 10) + "%"
	}
	return sandbox.Bytes(s.Bytes)
}

// Type implements pflag.Value.
func (*Size) Type() string { return "size" }

// Of returns s in bytes; a percentage is that of the disk that holds dir.
func (s *Size) Of(dir string) (int64, error) {
	if s.Percent == 0 {
		return s.Bytes, nil
	}
	disk, err := DiskBytes(dir)
	return disk / 100 * s.Percent, err
}

// Rate is a flag of bytes per second: "50MiB", "50MiB/s", or "0".
type Rate int64

// Set implements pflag.Value.
func (r *Rate) Set(text string) error {
	n, ok := parseBytes(strings.TrimSuffix(text, "/s"))
	if text != "0" && !ok {
		return errors.New("write 50MiB/s")
	}
	*r = Rate(n)
	return nil
}

// String implements pflag.Value.
func (r *Rate) String() string {
	if *r == 0 {
		return "0"
	}
	return sandbox.Bytes(int64(*r)) + "/s"
}

// Type implements pflag.Value.
func (*Rate) Type() string { return "rate" }

// Limit is a flag of a number of bytes: "1GiB", or "unlimited", which is 0.
type Limit int64

// Unlimited is the text of a zero Limit.
const Unlimited = "unlimited"

// Set implements pflag.Value.
func (l *Limit) Set(text string) error {
	n, ok := parseBytes(text)
	if text != Unlimited && !ok {
		return errors.New("write 256MiB or 1GiB, or " + Unlimited)
	}
	*l = Limit(n)
	return nil
}

// String implements pflag.Value.
func (l *Limit) String() string {
	if *l == 0 {
		return Unlimited
	}
	return sandbox.Bytes(int64(*l))
}

// Type implements pflag.Value.
func (*Limit) Type() string { return "size" }

// Bytes is a flag of a number of bytes: "256MiB", or "0".
type Bytes int64

// Set implements pflag.Value.
func (b *Bytes) Set(text string) error {
	n, ok := parseBytes(text)
	if text != "0" && !ok {
		return errors.New("write 1KiB or 256MiB")
	}
	*b = Bytes(n)
	return nil
}

// String implements pflag.Value.
func (b *Bytes) String() string { return sandbox.Bytes(int64(*b)) }

// Type implements pflag.Value.
func (*Bytes) Type() string { return "size" }

// Duration is a flag of a duration from 0 that also accepts days: "90s", "3h", "14d", "1d12h", "0".
type Duration time.Duration

const (
	// Day is 24 hours.
	Day = 24 * time.Hour
	// MaxDuration is a hundred years, well below the overflow of a time.Duration.
	MaxDuration = 36500 * Day
)

// Set implements pflag.Value.
func (d *Duration) Set(text string) error {
	days, rest, hasDays := strings.Cut(text, "d")
	if !hasDays {
		days, rest = "0", text
	}
	n, err := strconv.ParseUint(days, 10, 16)
	var r time.Duration
	if err == nil && rest != "" {
		r, err = time.ParseDuration(rest)
	}
	if err != nil || text == "" || r < 0 || r > MaxDuration || n > uint64((MaxDuration-r)/Day) {
		return errors.New("write 90s, 3h or 14d")
	}
	*d = Duration(time.Duration(n)*Day + r)
	return nil
}

// String implements pflag.Value.
func (d *Duration) String() string {
	t := time.Duration(*d)
	if t >= Day && t%Day == 0 {
		return strconv.Itoa(int(t/Day)) + "d"
	}
	text := t.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// Type implements pflag.Value.
func (*Duration) Type() string { return "duration" }

// Percent is a flag of a fraction: "1%", "0.5%" or "0.01". It rejects "1", which is ambiguous.
type Percent float64

// Set implements pflag.Value.
func (p *Percent) Set(text string) error {
	number, percent := strings.CutSuffix(strings.TrimSpace(text), "%")
	v, err := strconv.ParseFloat(number, 64)
	if percent {
		v /= 100
	}
	if err != nil || !(v >= 0 && v <= 1) { // also rejects NaN
		return errors.New("write a fraction from 0 to 100%, such as 1%, 0.5% or 0.01")
	}
	if v == 1 && !percent {
		return errors.New("write 1% or 100%")
	}
	*p = Percent(v)
	return nil
}

// String implements pflag.Value.
func (p *Percent) String() string { return strconv.FormatFloat(float64(*p)*100, 'g', 6, 64) + "%" }

// Type implements pflag.Value.
func (*Percent) Type() string { return "percent" }

// FileMode is a flag of permission bits, in octal.
type FileMode fs.FileMode

// Set implements pflag.Value.
func (m *FileMode) Set(s string) error {
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o777 {
		return errors.New("write 0600 or 0660")
	}
	*m = FileMode(n)
	return nil
}

// String implements pflag.Value.
func (m *FileMode) String() string { return fmt.Sprintf("%04o", uint32(*m)) }

// Type implements pflag.Value.
func (*FileMode) Type() string { return "octal" }
