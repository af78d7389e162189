// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
)

// DigestFunctions is a flag with the default digest function of each instance, for requests that state none.
type DigestFunctions struct {
	fallback   cas.Function // 0: the first of cas.Functions() with hashes of the same length
	byInstance map[string]cas.Function
}

// Set implements pflag.Value.
func (d *DigestFunctions) Set(s string) error {
	i := strings.LastIndex(s, "=")
	f, err := cas.ParseFunction(s[i+1:])
	if err != nil {
		return err
	}
	if i < 0 {
		d.fallback = f
		return nil
	}
	if err := cas.CheckInstanceName(s[:i]); err != nil {
		return err
	}
	if d.byInstance == nil {
		d.byInstance = map[string]cas.Function{}
	}
	d.byInstance[s[:i]] = f
	return nil
}

// String implements pflag.Value.
func (d *DigestFunctions) String() string {
	var all []string
	if d.fallback != 0 {
		all = append(all, d.fallback.String())
	}
	for name, f := range d.byInstance {
		all = append(all, fmt.Sprintf("%s=%v", name, f))
	}
	slices.Sort(all)
	return strings.Join(all, ",")
}

// Type implements pflag.Value.
func (d *DigestFunctions) Type() string { return "function" }

// Of returns the default function of an instance, or 0 if the flag states none.
func (d *DigestFunctions) Of(instance string) cas.Function {
	if f, ok := d.byInstance[instance]; ok {
		return f
	}
	return d.fallback
}

// Instances returns next with the default function of each instance moved to the front.
func (d *DigestFunctions) Instances(next cas.Instances) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in, err := next(name)
		f := d.Of(name)
		if err != nil || f == 0 || !slices.Contains(in.Serves(), f) {
			return in, err
		}
		first := *in
		first.Functions = []cas.Function{f}
		for _, other := range in.Serves() {
			if other != f {
				first.Functions = append(first.Functions, other)
			}
		}
		first.Unstated = first.Functions[:1:1]
		return &first, nil
	}
}
