// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
)

// size is a flag of bytes: "50GiB", "500MB", "1048576", or "10%" of the disk.
type size struct {
	bytes   int64
	percent int64 // of the disk, if bytes is 0
}

var units = []struct {
	suffix string
	bytes  int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12},
	{"K", 1 << 10}, {"M", 1 << 20}, {"G", 1 << 30}, {"T", 1 << 40}, {"B", 1},
}

func (s *size) Set(text string) error {
	if p, ok := strings.CutSuffix(text, "%"); ok {
		n, err := strconv.ParseInt(p, 10, 64)
		if err != nil || n < 1 || n > 100 {
			return fmt.Errorf("a share of the disk is a whole number from 1%% to 100%%")
		}
		*s = size{percent: n}
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
	*s = size{bytes: int64(n * float64(unit))}
	return nil
}

func (s *size) String() string {
	if s.percent > 0 {
		return fmt.Sprintf("%d%%", s.percent)
	}
	return sandbox.Bytes(s.bytes)
}

func (*size) Type() string { return "size" }

// on returns s in bytes, of the disk of dir where it is a share.
func (s *size) on(dir string) (int64, error) {
	if s.percent == 0 {
		return s.bytes, nil
	}
	disk, err := diskBytes(dir)
	return disk / 100 * s.percent, err
}

// rate is a flag of bytes a second: "50MiB", "50MiB/s", or "0".
type rate int64

func (r *rate) Set(text string) error {
	if text == "0" {
		*r = 0
		return nil
	}
	var s size
	if err := s.Set(strings.TrimSuffix(text, "/s")); err != nil || s.percent > 0 {
		return fmt.Errorf("write it as 50MiB, which is meant by the second")
	}
	*r = rate(s.bytes)
	return nil
}

func (r *rate) String() string {
	if *r == 0 {
		return "0"
	}
	return sandbox.Bytes(int64(*r)) + "/s"
}

func (*rate) Type() string { return "rate" }

// bound is a flag of bytes: "1GiB", or "unlimited", which is 0.
type bound int64

const unlimited = "unlimited"

func (b *bound) Set(text string) error {
	if text == unlimited {
		*b = 0
		return nil
	}
	var s size
	if err := s.Set(text); err != nil || s.percent > 0 {
		return fmt.Errorf("write it as 256MiB or 1GiB, or %s", unlimited)
	}
	*b = bound(s.bytes)
	return nil
}

func (b *bound) String() string {
	if *b == 0 {
		return unlimited
	}
	return sandbox.Bytes(int64(*b))
}

func (*bound) Type() string { return "size" }
