// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"errors"
	"strconv"
	"strings"
)

// A share is a flag of a part of a whole: "1%", "0.5%" or "0.01". "1" is refused, since it could be meant as either.
type Percent float64

// Set implements pflag.Value.
func (s *Percent) Set(text string) error {
	number, percent := strings.CutSuffix(strings.TrimSpace(text), "%")
	v, err := strconv.ParseFloat(number, 64)
	if percent {
		v /= 100
	}
	if err != nil || !(v >= 0 && v <= 1) { // which no NaN is
		return errors.New("write a share from 0 to 100%, as 1%, 0.5% or 0.01")
	}
	if v == 1 && !percent {
		return errors.New("write 1% or 100%")
	}
	*s = Percent(v)
	return nil
}

// String implements pflag.Value.
func (s *Percent) String() string { return strconv.FormatFloat(float64(*s)*100, 'g', 6, 64) + "%" }

// Type implements pflag.Value.
func (*Percent) Type() string { return "share" }
