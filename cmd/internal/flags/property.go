// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/cloister-build/cloister/worker"
)

// ParseProperties reads what a worker has to offer, each as NAME=VALUE, and returns it sorted.
func ParseProperties(texts []string) ([]worker.Property, error) {
	var all []worker.Property
	for _, text := range texts {
		name, value, ok := strings.Cut(text, "=")
		switch {
		case !ok || name == "" || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }):
			return nil, fmt.Errorf("--property %q: write it as NAME=VALUE, of printable text", text)
		case strings.HasPrefix(name, "cloister-"):
			return nil, fmt.Errorf("--property %s: %s is what an action asks the sandbox of its worker for, by its policy, and is not offered", text, name)
		}
		all = append(all, worker.Property{Name: name, Value: value})
	}
	slices.SortFunc(all, worker.Property.Compare)
	return slices.Compact(all), nil
}
