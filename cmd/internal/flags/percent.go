// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"errors"
	"strconv"
	"strings"
)

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
