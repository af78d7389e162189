// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// shared is the annotation of flags that Share marks.
const shared = "cloister_shared"

// Share marks flags that many commands have. Their help only names them, and one page explains them (SharedUsages), so
// that the help of a command fits on a screen.
func Share(f *pflag.FlagSet, names ...string) { annotate(f, shared, names) }

// columns is the width of --help.
const columns = 120

// SetHelp makes the help of cmd and of all commands below it name shared flags without their texts. Page is the command
// that explains them.
func SetHelp(cmd *cobra.Command, page string) {
	cobra.AddTemplateFunc("ownFlags", func(c *cobra.Command) string { return usages(c.LocalFlags(), false) })
	cobra.AddTemplateFunc("sharedFlags", sharedNames)
	cmd.SetUsageTemplate(`Usage:{{if .Runnable}}
  {{.UseLine}}{{end}}{{if .HasAvailableSubCommands}}
  {{.CommandPath}} COMMAND{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}{{$all := .Commands}}{{if eq (len .Groups) 0}}

Commands:{{range $all}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{else}}
{{range $group := .Groups}}
{{.Title}}{{range $all}}{{if and (eq .GroupID $group.ID) .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}
Other:{{range $all}}{{if and (eq .GroupID "") (or .IsAvailableCommand .IsAdditionalHelpTopicCommand)}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}{{end}}

{{with ownFlags .}}Flags:
{{.}}
{{end}}Shared flags, see ` + page + `:
{{sharedFlags .}}`)
}

// SharedUsages returns the texts of the shared flags of cmd and of all commands below it.
func SharedUsages(cmd *cobra.Command) string {
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	var add func(c *cobra.Command)
	add = func(c *cobra.Command) {
		for _, set := range []*pflag.FlagSet{c.LocalFlags(), c.InheritedFlags()} {
			set.VisitAll(func(f *pflag.Flag) {
				if f.Annotations[shared] != nil && all.Lookup(f.Name) == nil {
					all.AddFlag(f)
				}
			})
		}
		for _, sub := range c.Commands() {
			add(sub)
		}
	}
	add(cmd)
	return usages(all, true)
}

// usages returns the help texts of the flags in f that are shared, or of those that are not.
func usages(f *pflag.FlagSet, isShared bool) string {
	some := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.VisitAll(func(f *pflag.Flag) {
		if isShared == (f.Annotations[shared] != nil) && f.Name != "help" {
			some.AddFlag(f)
		}
	})
	return some.FlagUsagesWrapped(columns)
}

// sharedNames returns the names of the shared flags of a command, wrapped.
func sharedNames(c *cobra.Command) string {
	var names []string
	for _, set := range []*pflag.FlagSet{c.LocalFlags(), c.InheritedFlags()} {
		set.VisitAll(func(f *pflag.Flag) {
			name := "--" + f.Name
			if f.Shorthand != "" {
				name = "-" + f.Shorthand
			}
			if f.Annotations[shared] != nil {
				names = append(names, name)
			}
		})
	}
	slices.Sort(names)
	var b strings.Builder
	used := 0
	for _, name := range names {
		if used == 0 || used+1+len(name) > columns {
			if used > 0 {
				b.WriteByte('\n')
			}
			b.WriteByte(' ')
			used = 1
		}
		b.WriteString(" " + name)
		used += 1 + len(name)
	}
	b.WriteByte('\n')
	return b.String()
}
