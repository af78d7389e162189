// SPDX-License-Identifier: Apache-2.0

package render

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"reflect"
	"strconv"
	"sync/atomic"

	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Output holds the flags that select how much every command prints, and in which form.
type Output struct {
	quiet, verbose   bool
	color, logFormat string
}

// Register adds the flags to cmd and to all commands below it.
func (o *Output) Register(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	f.BoolVarP(&o.quiet, "quiet", "q", false, "omit notes, progress and informational log lines")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "add details")
	f.StringVar(&o.color, "color", "auto", "coloured output: auto (on a terminal, unless NO_COLOR is set), always or never")
	f.StringVar(&o.logFormat, "log-format", "text", "format of log lines: text or json")
	flags.Share(f, "quiet", "verbose", "color", "log-format")
	cmd.MarkFlagsMutuallyExclusive("quiet", "verbose")
	cmd.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error { return o.apply(os.Stderr) }
}

// apply makes the flags effective for the process; its log lines go to log.
func (o *Output) apply(log io.Writer) error {
	options := &slog.HandlerOptions{Level: slog.LevelInfo}
	switch {
	case o.quiet:
		options.Level = slog.LevelWarn
	case o.verbose:
		options.Level = slog.LevelDebug
	}
	switch o.logFormat {
	case "text":
		slog.SetDefault(slog.New(slog.NewTextHandler(log, options)))
	case "json":
		slog.SetDefault(slog.New(slog.NewJSONHandler(log, options)))
	default:
		return fmt.Errorf("--log-format %q: write text or json", o.logFormat)
	}
	switch o.color {
	case "auto", "always", "never":
		colour.Store(o.color)
	default:
		return fmt.Errorf("--color %q: write auto, always or never", o.color)
	}
	return nil
}

// colour is the value of --color, for everything that this process prints.
var colour atomic.Value

// Colours reports whether to colour the output to out.
func Colours(out io.Writer) bool {
	switch colour.Load() {
	case "always":
		return true
	case "never":
		return false
	}
	return os.Getenv("NO_COLOR") == "" && terminal.Is(out) // no-color.org
}

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
