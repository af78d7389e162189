// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/cloister-build/cloister/worker"
)

// ParseProperties parses the platform properties that a worker offers, each NAME=VALUE, and returns them sorted.
func ParseProperties(texts []string) ([]worker.Property, error) {
	var all []worker.Property
	for _, text := range texts {
		name, value, ok := strings.Cut(text, "=")
		switch {
		case !ok || name == "" || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }):
			return nil, fmt.Errorf("--property %q: write printable NAME=VALUE", text)
		case strings.HasPrefix(name, "cloister-"):
			return nil, fmt.Errorf("--property %s: actions request %s from the sandbox, subject to the policy; "+
				"workers cannot offer it", text, name)
		}
		all = append(all, worker.Property{Name: name, Value: value})
	}
	slices.SortFunc(all, worker.Property.Compare)
	return slices.Compact(all), nil
}
