// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"errors"
	"strconv"
	"strings"
	"time"
)

// Duration is a flag of time that is not negative: "90s", "3h", "14d", "1d12h", "0".
type Duration time.Duration

const (
	Day = 24 * time.Hour
	// maxSpan is a hundred years: more would overflow.
	MaxDuration = 36500 * Day
)

func (s *Duration) Set(text string) error {
	days, rest, isDays := strings.Cut(text, "d")
	if !isDays {
		days, rest = "0", text
	}
	n, err := strconv.ParseUint(days, 10, 16)
	var d time.Duration
	if err == nil && rest != "" {
		d, err = time.ParseDuration(rest)
	}
	if err != nil || text == "" || d < 0 || d > MaxDuration || n > uint64((MaxDuration-d)/Day) {
		return errors.New("write it as 90s, 3h or 14d")
	}
	*s = Duration(time.Duration(n)*Day + d)
	return nil
}

func (s *Duration) String() string {
	d := time.Duration(*s)
	if d >= Day && d%Day == 0 {
		return strconv.Itoa(int(d/Day)) + "d"
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

func (*Duration) Type() string { return "time" }
