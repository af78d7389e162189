// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"errors"
	"strconv"
	"strings"
	"time"
)

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
