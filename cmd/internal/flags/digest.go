// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
)

// A meant is a flag that says which digest function clients mean who state none: by the name of an instance, and for
// fallback others.
type DigestFunctions struct {
	fallback   cas.Function // 0: the first of cas.Functions() with hashes of that length
	byInstance map[string]cas.Function
}

// Set implements pflag.Value.
func (m *DigestFunctions) Set(s string) error {
	i := strings.LastIndex(s, "=")
	f, err := cas.ParseFunction(s[i+1:])
	if err != nil {
		return err
	}
	if i < 0 {
		m.fallback = f
		return nil
	}
	if err := cas.CheckInstanceName(s[:i]); err != nil {
		return err
	}
	if m.byInstance == nil {
		m.byInstance = map[string]cas.Function{}
	}
	m.byInstance[s[:i]] = f
	return nil
}

// String implements pflag.Value.
func (m *DigestFunctions) String() string {
	var all []string
	if m.fallback != 0 {
		all = append(all, m.fallback.String())
	}
	for name, f := range m.byInstance {
		all = append(all, fmt.Sprintf("%s=%v", name, f))
	}
	slices.Sort(all)
	return strings.Join(all, ",")
}

// Type implements pflag.Value.
func (m *DigestFunctions) Type() string { return "function" }

// Instances returns next with the function that is meant before all others.
func (m *DigestFunctions) Instances(next cas.Instances) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in, err := next(name)
		f, ok := m.byInstance[name]
		if !ok {
			f = m.fallback
		}
		if err != nil || f == 0 || !slices.Contains(in.Serves(), f) {
			return in, err
		}
		first := *in
		first.Functions = append([]cas.Function{f}, slices.DeleteFunc(slices.Clone(in.Serves()), func(g cas.Function) bool { return g == f })...)
		return &first, nil
	}
}
