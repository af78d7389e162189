// SPDX-License-Identifier: Apache-2.0

// Package flags defines the value types of command-line flags, such as sizes, durations and percentages, and explains
// mistakes in a command line.
package flags

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
)

// Bytes is a flag of bytes: "256MiB", or "0".
type Bytes int64

func (a *Bytes) Set(text string) error {
	if text == "0" {
		*a = 0
		return nil
	}
	var s Size
	if err := s.Set(text); err != nil || s.Percent > 0 {
		return errors.New("write it as 1KiB or 256MiB")
	}
	*a = Bytes(s.Bytes)
	return nil
}

func (a *Bytes) String() string { return sandbox.Bytes(int64(*a)) }

func (*Bytes) Type() string { return "size" }

// Size is a flag of bytes: "50GiB", "500MB", "1048576", or "10%" of the disk.
type Size struct {
	Bytes   int64
	Percent int64 // of the disk, if bytes is 0
}

var units = []struct {
	suffix string
	bytes  int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12},
	{"K", 1 << 10}, {"M", 1 << 20}, {"G", 1 << 30}, {"T", 1 << 40}, {"B", 1},
}

func (s *Size) Set(text string) error {
	if p, ok := strings.CutSuffix(text, "%"); ok {
		n, err := strconv.ParseInt(p, 10, 64)
		if err != nil || n < 1 || n > 100 {
			return fmt.Errorf("a share of the disk is a whole number from 1%% to 100%%")
		}
		*s = Size{Percent: n}
		return nil
	}
	number, unit := text, int64(1)
	for _, u := range units {
		if n, ok := strings.CutSuffix(text, u.suffix); ok {
			number, unit = n, u.bytes
			break
		}
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if err != nil || n <= 0 || n*float64(unit) >= math.MaxInt64 || n*float64(unit) < 1 {
		return fmt.Errorf("write it as 50GiB, 500MB or 10%%")
	}
	*s = Size{Bytes: int64(n * float64(unit))}
	return nil
}

func (s *Size) String() string {
	if s.Percent > 0 {
		return fmt.Sprintf("%d%%", s.Percent)
	}
	return sandbox.Bytes(s.Bytes)
}

func (*Size) Type() string { return "size" }

// Of returns s in bytes, of the disk of dir where it is a share.
func (s *Size) Of(dir string) (int64, error) {
	if s.Percent == 0 {
		return s.Bytes, nil
	}
	disk, err := DiskBytes(dir)
	return disk / 100 * s.Percent, err
}

// Rate is a flag of bytes a second: "50MiB", "50MiB/s", or "0".
type Rate int64

func (r *Rate) Set(text string) error {
	if text == "0" {
		*r = 0
		return nil
	}
	var s Size
	if err := s.Set(strings.TrimSuffix(text, "/s")); err != nil || s.Percent > 0 {
		return fmt.Errorf("write it as 50MiB, which is meant by the second")
	}
	*r = Rate(s.Bytes)
	return nil
}

func (r *Rate) String() string {
	if *r == 0 {
		return "0"
	}
	return sandbox.Bytes(int64(*r)) + "/s"
}

func (*Rate) Type() string { return "rate" }

// Limit is a flag of bytes: "1GiB", or "unlimited", which is 0.
type Limit int64

const Unlimited = "unlimited"

func (b *Limit) Set(text string) error {
	if text == Unlimited {
		*b = 0
		return nil
	}
	var s Size
	if err := s.Set(text); err != nil || s.Percent > 0 {
		return fmt.Errorf("write it as 256MiB or 1GiB, or %s", Unlimited)
	}
	*b = Limit(s.Bytes)
	return nil
}

func (b *Limit) String() string {
	if *b == 0 {
		return Unlimited
	}
	return sandbox.Bytes(int64(*b))
}

func (*Limit) Type() string { return "size" }
