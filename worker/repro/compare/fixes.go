// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"cmp"
	"path"
	"regexp"
	"slices"
	"strings"
)

// A Fix removes a cause from the files of a format, or from those that a program writes. It has a text for people. If
// it also has Env, Args, Swap or Before, Apply changes a command accordingly.
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
	// Marks are texts in a command that already has the fix. Names in Env and Args are implied.
	Marks []string
}

// A Making is how an action makes its outputs, as far as known.
type Making struct {
	Args []string // of the command
	Env  []string // of the command: KEY=VALUE
	// Programs are the paths of executed programs.
	Programs []string

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
	names := plainNames(programs)
	is := func(p string) bool { return names[plainName(p)] }
	if slices.ContainsFunc(m.Programs, is) || len(m.Args) > 0 && is(m.Args[0]) {
		return true
	}
	i := scriptOf(m.Args)
	return i > 0 && len(commandsIn(m.Args[i], programs)) > 0
}

// has reports whether the command has a fix already: all its variables, all its options, or one of its marks.
func (m *Making) has(f *Fix) bool { return m != nil && once(&m.had, f, m.contains) }

func (m *Making) contains(f *Fix) bool {
	text := strings.Join(m.Args, " ")
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
	return len(f.Env) > 0 && !slices.ContainsFunc(f.Env, func(kv string) bool { return !sets(kv) }) ||
		len(f.Args) > 0 && !slices.ContainsFunc(f.Args, lacks) ||
		slices.ContainsFunc(f.Marks, func(mark string) bool {
			return strings.Contains(text, mark) || strings.HasSuffix(mark, "EPOCH") && sets(mark+"=")
		})
}

// Mechanical reports whether Apply can change some command.
func (f *Fix) Mechanical() bool {
	return len(f.Env)+len(f.Args) > 0 || f.Swap[0] != "" || f.Before != ""
}

// Apply returns a command with the fix, except for its variables, or false if it does not fit. args is that of a
// program, or of a shell with a script after -c.
func (f *Fix) Apply(args []string) ([]string, bool) {
	args = slices.Clone(args)
	script := scriptOf(args)
	switch {
	case !f.Mechanical() || len(args) == 0:
		return nil, false
	case f.Swap[0] != "":
		return f.swap(args, script)
	case f.Before != "" && script == 0:
		return nil, false
	case f.Before != "":
		args[script] = f.Before + "\n" + args[script]
	case len(f.Args) > 0 && script > 0:
		return args, f.insert(&args[script])
	case len(f.Args) > 0 && (!isProgramOf(args[0], f.Programs) || slices.ContainsFunc(f.Args, isExpanded)):
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
	ends := commandsIn(*script, f.Programs)
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

// scriptOf returns the index of a shell's script among the arguments of a command, or 0.
func scriptOf(args []string) int {
	if len(args) < 3 || !isProgramOf(args[0], "sh bash dash") {
		return 0
	}
	for i, arg := range args[1 : len(args)-1] {
		if strings.HasPrefix(arg, "-") && strings.HasSuffix(arg, "c") && !strings.HasPrefix(arg, "--") {
			return i + 2
		}
	}
	return 0
}

var (
	shellWord = regexp.MustCompile(`[\w./+@=:$"{}-]+`)
	// beforeCommand matches what precedes the name of a program in a script: an operator, a word of the shell or of a
	// program that executes another, or an assignment. After python -m there is a module.
	beforeCommand = regexp.MustCompile("(?:^|[\n;&|(`{!]|" +
		"(?:^|\\s)(?:then|do|else|exec|env|xargs|time|nice|fakeroot|-exec|-m|\\w+=\\S*))[ \t]*$")
)

// commandsIn returns where the names of some programs end in a script, if it executes them.
func commandsIn(script, programs string) []int {
	var ends []int
	names := plainNames(programs)
	for _, at := range shellWord.FindAllStringIndex(script, -1) {
		if names[plainName(script[at[0]:at[1]])] && beforeCommand.MatchString(script[max(0, at[0]-200):at[0]]) {
			ends = append(ends, at[1])
		}
	}
	return ends
}

var decoration = regexp.MustCompile(`^(?:x86_64|aarch64|i686|arm)-linux-gnu-|-?[0-9.]+(?:-posix|-win32)?$`)

// isProgramOf reports whether a path is that of one of several programs, regardless of versions and target systems:
// python3.11 is python, x86_64-linux-gnu-gcc-12 is gcc.
func isProgramOf(name, programs string) bool { return plainNames(programs)[plainName(name)] }

func plainNames(programs string) map[string]bool {
	names := map[string]bool{}
	for p := range strings.FieldsSeq(programs) {
		names[plainName(p)] = true
	}
	return names
}

func plainName(name string) string {
	return decoration.ReplaceAllString(strings.TrimPrefix(path.Base(name), "-"), "")
}
