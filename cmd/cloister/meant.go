// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
)

// A meant is a flag that says which digest function clients mean who state none: by the name of an instance, and for
// all others.
type meant struct {
	all cas.Function // 0: the first of cas.Functions() with hashes of that length
	of  map[string]cas.Function
}

// Set implements pflag.Value.
func (m *meant) Set(s string) error {
	i := strings.LastIndex(s, "=")
	f, err := cas.ParseFunction(s[i+1:])
	if err != nil {
		return err
	}
	if i < 0 {
		m.all = f
		return nil
	}
	if err := cas.CheckInstanceName(s[:i]); err != nil {
		return err
	}
	if m.of == nil {
		m.of = map[string]cas.Function{}
	}
	m.of[s[:i]] = f
	return nil
}

// String implements pflag.Value.
func (m *meant) String() string {
	var all []string
	if m.all != 0 {
		all = append(all, m.all.String())
	}
	for name, f := range m.of {
		all = append(all, fmt.Sprintf("%s=%v", name, f))
	}
	slices.Sort(all)
	return strings.Join(all, ",")
}

// Type implements pflag.Value.
func (m *meant) Type() string { return "function" }

// instances returns next with the function that is meant before all others.
func (m *meant) instances(next cas.Instances) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in, err := next(name)
		f, ok := m.of[name]
		if !ok {
			f = m.all
		}
		if err != nil || f == 0 || !slices.Contains(in.Serves(), f) {
			return in, err
		}
		first := *in
		first.Functions = append([]cas.Function{f}, slices.DeleteFunc(slices.Clone(in.Serves()), func(g cas.Function) bool { return g == f })...)
		return &first, nil
	}
}
