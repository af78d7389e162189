// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strconv"
	"strings"
	"time"
)

// span is a flag of time that is not negative: "90s", "3h", "14d", "1d12h", "0".
type span time.Duration

const (
	day = 24 * time.Hour
	// maxSpan is a hundred years: more would overflow.
	maxSpan = 36500 * day
)

func (s *span) Set(text string) error {
	days, rest, isDays := strings.Cut(text, "d")
	if !isDays {
		days, rest = "0", text
	}
	n, err := strconv.ParseUint(days, 10, 16)
	var d time.Duration
	if err == nil && rest != "" {
		d, err = time.ParseDuration(rest)
	}
	if err != nil || text == "" || d < 0 || d > maxSpan || n > uint64((maxSpan-d)/day) {
		return errors.New("write it as 90s, 3h or 14d")
	}
	*s = span(time.Duration(n)*day + d)
	return nil
}

func (s *span) String() string {
	d := time.Duration(*s)
	if d >= day && d%day == 0 {
		return strconv.Itoa(int(d/day)) + "d"
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

func (*span) Type() string { return "time" }
