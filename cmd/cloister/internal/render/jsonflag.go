// SPDX-License-Identifier: Apache-2.0

package render

import (
	"reflect"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// A jsonFlag is a boolean flag --json that knows what its command prints.
type jsonFlag struct {
	on      *bool
	printed []reflect.Type
}

// JSONFlag adds --json, which sets on. The command then prints a value of one of the types of printed, whose schemas
// cloister schema prints.
func JSONFlag(f *pflag.FlagSet, on *bool, usage string, printed ...any) {
	value := &jsonFlag{on: on}
	for _, v := range printed {
		value.printed = append(value.printed, reflect.TypeOf(v))
	}
	f.VarPF(value, "json", "", usage).NoOptDefVal = "true"
}

// Printed returns the types of the values that a command prints with --json, or nil.
func Printed(cmd *cobra.Command) []reflect.Type {
	if f := cmd.Flags().Lookup("json"); f != nil {
		if value, ok := f.Value.(*jsonFlag); ok {
			return value.printed
		}
	}
	return nil
}

func (j *jsonFlag) Set(text string) (err error) {
	*j.on, err = strconv.ParseBool(text)
	return err
}

func (j *jsonFlag) String() string   { return strconv.FormatBool(*j.on) }
func (j *jsonFlag) Type() string     { return "bool" }
func (j *jsonFlag) IsBoolFlag() bool { return true }
