// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/worker/repro/internal/shell"
)

// A Fix removes a cause from the files of a format, or from those that a program writes. It has a text for people. If
// it also has Env, Args, Swap, Before or Wrap, Apply changes a command accordingly.
type Fix struct {
	Cause Cause
	// Format is the name of the differing file's format, or of the format of a file that contains it; "" means any.
	Format string
	// Programs are the names of the programs that the fix is for, separated by spaces; "" means any.
	Programs string
	Text     string
	Env      []string  // variables to set: KEY=VALUE
	Args     []string  // arguments to insert after the name of the program
	Swap     [2]string // a regular expression and its replacement in the command
	Before   string    // a line to insert before a shell script
	Wrap     []string  // a program, with arguments, that executes the command
	// Marks are texts in a command that already has the fix. Names in Env and Args are implied, unless there is a Swap.
	Marks []string
}

// A Making is how an action makes its outputs, as far as known.
type Making struct {
	Args []string // of the command
	Env  []string // of the command: KEY=VALUE
	// Programs are the paths of executed programs.
	Programs []string
	// Scripts are the texts of shell scripts that the command executes and that are inputs.
	Scripts []string

	// Scripts may be long, so they are searched once.
	ran map[string]bool // results of Ran
	had map[*Fix]bool   // results of has
}

// FixFor returns how to remove a cause from files of a format, "" for Unknown.
func FixFor(cause Cause, format string) string {
	d := Difference{Cause: cause, Format: format}
	for _, f := range FixesOf(&d, nil) {
		return f.Text
	}
	return ""
}

// FixesOf returns what may remove a difference, the most specific first, without what the action does already. m may be
// nil.
func FixesOf(d *Difference, m *Making) []*Fix {
	if d.Cause == Unknown {
		return nil
	}
	var all []*Fix
	rank := map[*Fix]int{}
	for i := range fixes {
		f := &fixes[i]
		if f.Cause != d.Cause {
			continue
		}
		if r := f.rank(d, m); r >= 0 && !m.has(f) {
			all, rank[f] = append(all, f), r
		}
	}
	slices.SortStableFunc(all, func(a, b *Fix) int { return cmp.Compare(rank[b], rank[a]) })
	return all
}

// rank returns how specific f is for a difference; -1 if it does not apply.
func (f *Fix) rank(d *Difference, m *Making) int {
	exact := f.Format != "" && f.Format == d.Format
	outer := slices.Contains(d.Within, f.Format) && f.Programs != "" // what wrote the outer file decides
	ran := f.Programs != "" && m.Ran(f.Programs)
	switch {
	case exact && ran:
		return 6
	case outer && ran:
		return 7
	case exact && f.Programs == "":
		return 5
	case f.Format == "" && ran:
		return 4
	case exact && m == nil:
		return 2
	case f.Format == "" && f.Programs == "":
		return 1
	case exact: // by a program that is not known to have run
		return 0
	}
	return -1
}

// Ran reports whether one of several programs, separated by spaces, was executed or is named in the command.
func (m *Making) Ran(programs string) bool {
	if m == nil {
		return false
	}
	return once(&m.ran, programs, m.runs)
}

// once returns find(of), which known remembers.
func once[K comparable](known *map[K]bool, of K, find func(K) bool) bool {
	if *known == nil {
		*known = map[K]bool{}
	}
	found, ok := (*known)[of]
	if !ok {
		found = find(of)
		(*known)[of] = found
	}
	return found
}

func (m *Making) runs(programs string) bool {
	is := shell.Programs(programs)
	if slices.ContainsFunc(m.Programs, is) || len(m.Args) > 0 && is(m.Args[0]) {
		return true
	}
	runs := func(script string) bool { return len(shell.Commands(script, programs)) > 0 }
	i := shell.Script(m.Args)
	return i > 0 && runs(m.Args[i]) || slices.ContainsFunc(m.Scripts, runs)
}

// has reports whether the command or a script has a fix already: all its variables, all its options, or one of its
// marks.
func (m *Making) has(f *Fix) bool { return m != nil && once(&m.had, f, m.contains) }

func (m *Making) contains(f *Fix) bool {
	text := strings.Join(slices.Concat(m.Args, m.Scripts), " ")
	sets := func(kv string) bool {
		key, _, _ := strings.Cut(kv, "=")
		inEnv := slices.ContainsFunc(m.Env, func(e string) bool { return strings.HasPrefix(e, key+"=") })
		return inEnv || strings.Contains(text, key+"=")
	}
	lacks := func(arg string) bool {
		option, _, _ := strings.Cut(arg, "=")
		if !strings.HasPrefix(option, "-") {
			return !strings.Contains(text, option)
		}
		return !slices.ContainsFunc(strings.Fields(text), func(word string) bool {
			word, _, _ = strings.Cut(strings.Trim(word, `'"`), "=")
			return word == option
		})
	}
	return len(f.Env) > 0 && f.Swap[0] == "" && !slices.ContainsFunc(f.Env, func(kv string) bool { return !sets(kv) }) ||
		len(f.Args) > 0 && !slices.ContainsFunc(f.Args, lacks) ||
		slices.ContainsFunc(f.Marks, func(mark string) bool {
			return strings.Contains(text, mark) || strings.HasSuffix(mark, "EPOCH") && sets(mark+"=")
		})
}

// Mechanical reports whether Apply can change some command.
func (f *Fix) Mechanical() bool {
	return len(f.Env)+len(f.Args)+len(f.Wrap) > 0 || f.Swap[0] != "" || f.Before != ""
}

// Apply returns a command with the fix, except for its variables, or false if it does not fit. args is that of a
// program, or of a shell with a script after -c.
func (f *Fix) Apply(args []string) ([]string, bool) {
	args = slices.Clone(args)
	script := shell.Script(args)
	switch {
	case !f.Mechanical() || len(args) == 0:
		return nil, false
	case f.Swap[0] != "":
		return f.swap(args, script)
	case len(f.Wrap) > 0:
		args = slices.Concat(f.Wrap, args)
	case f.Before != "" && script == 0:
		return nil, false
	case f.Before != "":
		args[script] = f.Before + "\n" + args[script]
	case len(f.Args) > 0 && script > 0:
		return args, f.insert(&args[script])
	case len(f.Args) > 0 && (!shell.IsProgram(args[0], f.Programs) || slices.ContainsFunc(f.Args, isExpanded)):
		return nil, false
	case len(f.Args) > 0:
		args = slices.Insert(args, 1, f.Args...)
	}
	return args, true
}

// swap replaces a part of a script or of the arguments of a program, which the expression sees as lines.
func (f *Fix) swap(args []string, script int) ([]string, bool) {
	old := regexp.MustCompile(f.Swap[0])
	if script > 0 {
		before := args[script]
		args[script] = old.ReplaceAllString(before, f.Swap[1])
		return args, args[script] != before
	}
	text := strings.Join(args, "\n")
	if strings.Count(text, "\n") != len(args)-1 {
		return nil, false
	}
	changed := old.ReplaceAllString(text, f.Swap[1])
	return strings.Split(changed, "\n"), changed != text
}

func isExpanded(arg string) bool { return strings.Contains(arg, "$") }

// insert inserts the arguments of f after each command of a script that executes one of its programs.
func (f *Fix) insert(script *string) bool {
	ends := shell.Commands(*script, f.Programs)
	slices.Reverse(ends)
	var quoted strings.Builder
	for _, arg := range f.Args {
		switch {
		case strings.Contains(arg, `"`):
			arg = "'" + arg + "'"
		case strings.ContainsAny(arg, " ;&|<>()*"):
			arg = `"` + arg + `"`
		}
		quoted.WriteString(" " + arg)
	}
	for _, end := range ends {
		*script = (*script)[:end] + quoted.String() + (*script)[end:]
	}
	return len(ends) > 0
}
