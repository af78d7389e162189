// SPDX-License-Identifier: Apache-2.0

// Package shell finds the programs and the script files that commands execute. It reads shell scripts by their usual
// form only: what it misses is not suggested as a place of a fix.
package shell

import (
	"path"
	"regexp"
	"strings"
)

const shells = "sh bash dash"

// Script returns the index of a shell's script among the arguments of a command, or 0.
func Script(args []string) int {
	if len(args) < 3 || !IsProgram(args[0], shells) {
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

// Commands returns where the names of some programs end in a script, if it executes them.
func Commands(script, programs string) []int {
	var ends []int
	is := Programs(programs)
	for _, at := range shellWord.FindAllStringIndex(script, -1) {
		if is(script[at[0]:at[1]]) && beforeCommand.MatchString(script[max(0, at[0]-200):at[0]]) {
			ends = append(ends, at[1])
		}
	}
	return ends
}

var decoration = regexp.MustCompile(`^(?:x86_64|aarch64|i686|arm)-linux-gnu-|-?[0-9.]+(?:-posix|-win32)?$`)

// IsProgram reports whether a path is that of one of several programs, regardless of versions and target systems:
// python3.11 is python, x86_64-linux-gnu-gcc-12 is gcc.
func IsProgram(name, programs string) bool { return Programs(programs)(name) }

// Programs returns IsProgram for the same programs.
func Programs(programs string) func(name string) bool {
	names := map[string]bool{}
	for p := range strings.FieldsSeq(programs) {
		names[plainName(p)] = true
	}
	return func(name string) bool { return names[plainName(name)] }
}

func plainName(name string) string {
	return decoration.ReplaceAllString(strings.TrimPrefix(path.Base(name), "-"), "")
}

// Files returns the paths of scripts that a command executes, as it names them: the argument of a shell or of its
// source command, and programs named with a slash. They may be other programs, or absent.
func Files(args []string) []string {
	if len(args) == 0 {
		return nil
	}
	if i := Script(args); i > 0 {
		return FilesOf(args[i])
	}
	if IsProgram(args[0], shells) {
		return operand(args[1:])
	}
	return program(args[0])
}

// FilesOf is Files for a script.
func FilesOf(script string) []string {
	var all []string
	for _, at := range shellWord.FindAllStringIndex(script, -1) {
		if !beforeCommand.MatchString(script[max(0, at[0]-200):at[0]]) {
			continue
		}
		name := script[at[0]:at[1]]
		if name == "." || name == "source" || IsProgram(name, shells) {
			line, _, _ := strings.Cut(script[at[1]:], "\n")
			all = append(all, operand(strings.Fields(endOfCommand.ReplaceAllString(line, "")))...)
			continue
		}
		all = append(all, program(name)...)
	}
	return all
}

var endOfCommand = regexp.MustCompile("[;&|<>()`].*")

// operand returns the first of a shell's arguments that is not an option, unless the script is an option itself.
func operand(args []string) []string {
	for i := 0; i < len(args); i++ {
		switch option := strings.HasPrefix(args[i], "-") || strings.HasPrefix(args[i], "+"); {
		case !option:
			return []string{strings.Trim(args[i], `'"`)}
		case strings.HasSuffix(args[i], "c"), strings.HasSuffix(args[i], "s"):
			return nil
		case strings.HasSuffix(args[i], "o"): // -o pipefail
			i++
		}
	}
	return nil
}

func program(name string) []string {
	if !strings.Contains(name, "/") {
		return nil
	}
	return []string{name}
}

var interpreter = regexp.MustCompile(`^#![ \t]*\S*/(?:env[ \t]+)?(?:ba|da)?sh(?:[ \t].*)?\n`)

// Interpreter returns the length of the first line of a script if that names a shell, or else 0.
func Interpreter(script string) int { return len(interpreter.FindString(script)) }
