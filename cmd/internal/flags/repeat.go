// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"strings"

	"github.com/spf13/pflag"
)

// repeatable is the annotation of flags that Repeatable marks.
const repeatable = "cloister_repeatable"

// Repeatable marks flags of our own types that collect the values of several uses.
func Repeatable(f *pflag.FlagSet, names ...string) {
	for _, name := range names {
		if err := f.SetAnnotation(name, repeatable, []string{"true"}); err != nil {
			panic(err) // there is no such flag
		}
	}
}

// IsRepeatable reports whether a flag collects the values of several uses.
func IsRepeatable(f *pflag.Flag) bool {
	_, list := f.Value.(pflag.SliceValue)
	return list || f.Annotations[repeatable] != nil
}

// Variable returns the environment variable of a flag, such as CLOISTER_MAX_SIZE for max-size.
func Variable(name string) string {
	return "CLOISTER_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
}
