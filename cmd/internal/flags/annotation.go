// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// mayBeEmpty is the annotation of flags that AllowEmpty permits to be empty.
const mayBeEmpty = "cloister_may_be_empty"

// AllowEmpty permits the empty text as the value of flags for which it has a meaning of its own. ExplainMistakes
// refuses it for all other flags: an unset variable in a unit file, as in --auth "$AUTH", must not disable a
// protection.
func AllowEmpty(f *pflag.FlagSet, names ...string) { annotate(f, mayBeEmpty, names) }

// annotate sets an annotation on the named flags, which must exist.
func annotate(f *pflag.FlagSet, key string, names []string) {
	for _, name := range names {
		if err := f.SetAnnotation(name, key, []string{"true"}); err != nil {
			panic(err) // there is no such flag
		}
	}
}

// explainEmpty returns an error if a flag was given an empty value.
func explainEmpty(cmd *cobra.Command) (err error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if err == nil {
			err = CheckEmpty(f)
		}
	})
	return err
}

// CheckEmpty returns an error if the value of a flag that was given is empty, unless AllowEmpty permits that.
func CheckEmpty(f *pflag.Flag) error {
	if f.Annotations[mayBeEmpty] == nil && empty(f.Value) {
		return fmt.Errorf("--%s is empty: write a value or omit the flag; it is the %s", f.Name, f.Usage)
	}
	return nil
}

// empty reports whether a value that was given is the empty text, or a list without elements or with an empty one.
func empty(v pflag.Value) bool {
	if list, ok := v.(pflag.SliceValue); ok {
		values := list.GetSlice()
		return len(values) == 0 || slices.Contains(values, "")
	}
	return v.String() == ""
}

// repeatable is the annotation of flags that Repeatable marks.
const repeatable = "cloister_repeatable"

// Repeatable marks flags of our own types that collect the values of several uses.
func Repeatable(f *pflag.FlagSet, names ...string) { annotate(f, repeatable, names) }

// IsRepeatable reports whether a flag collects the values of several uses.
func IsRepeatable(f *pflag.Flag) bool {
	_, list := f.Value.(pflag.SliceValue)
	return list || f.Annotations[repeatable] != nil
}

// Variable returns the environment variable of a flag, such as CLOISTER_MAX_SIZE for max-size.
func Variable(name string) string {
	return "CLOISTER_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
}
