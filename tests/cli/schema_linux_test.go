// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/jsonschema-go/jsonschema"
)

// TestEveryOutputHasASchema: each command with --json has a schema, which prints an output of it, and is run by a
// story, which checks that.
func TestEveryOutputHasASchema(t *testing.T) {
	out := must.Get(exec.CommandContext(t.Context(), built.Path(t), "schema").Output())(t)
	commands := strings.Split(strings.TrimSpace(string(out)), "\n")
	expect.That(t, len(commands) >= 35, "got %d commands with a schema, want 35 or more", len(commands))
	var stories []byte
	for _, path := range must.Get(filepath.Glob("testdata/script/*.txtar"))(t) {
		stories = append(stories, must.Get(os.ReadFile(path))(t)...)
	}
	for _, c := range commands {
		if c == "invocation show" {
			continue // stories have no Bazel; TestSchemasMatchTypes checks its type
		}
		line := regexp.MustCompile(`(?m)(^| )(cloister|client|store) \d+ ` + c + ` (.* )?--json( |$)`)
		expect.That(t, line.Match(stories), "no story runs cloister %s --json", c)
	}
}

// checkJSON checks the last standard output against the schema of its command if the command line has --json.
func (s *story) checkJSON(args []string) error {
	if at := slices.Index(args, "--"); at >= 0 {
		args = args[:at]
	}
	if !slices.Contains(args, "--json") {
		return nil
	}
	end := slices.IndexFunc(args, func(arg string) bool { return strings.HasPrefix(arg, "-") })
	text := s.script.ReadFile("stdout")
	if text == "" && args[0] != "0" {
		return nil // an error instead of an answer
	}
	for words := args[1:end]; len(words) > 0; words = words[:len(words)-1] { // without arguments
		if schema, err := schemaOf(built.Path(s), strings.Join(words, " ")); err == nil {
			return conforms(schema, text)
		}
	}
	return fmt.Errorf("no schema for %q", args[1:])
}

// conforms checks values of JSON against a schema.
func conforms(schema *jsonschema.Resolved, text string) error {
	values := 0
	for d := json.NewDecoder(strings.NewReader(text)); ; values++ {
		var v any
		switch err := d.Decode(&v); {
		case errors.Is(err, io.EOF) && values > 0:
			return nil
		case err != nil:
			return fmt.Errorf("not JSON: %w", err)
		}
		if err := schema.Validate(v); err != nil {
			return fmt.Errorf("does not conform to cloister schema: %w\n%s", err, text)
		}
	}
}

var schemas sync.Map // of commands

// schemaOf returns the schema of a command, without permission for other fields.
func schemaOf(program, command string) (*jsonschema.Resolved, error) {
	if s, ok := schemas.Load(command); ok {
		return s.(*jsonschema.Resolved), nil
	}
	text, err := exec.Command(program, append([]string{"schema"}, strings.Fields(command)...)...).Output()
	if err != nil {
		return nil, err
	}
	var s jsonschema.Schema
	if err := json.NewDecoder(bytes.NewReader(text)).Decode(&s); err != nil {
		return nil, err
	}
	closeObjects(&s)
	resolved, err := s.Resolve(nil)
	if err == nil {
		schemas.Store(command, resolved)
	}
	return resolved, err
}

func closeObjects(s *jsonschema.Schema) {
	if s == nil {
		return
	}
	if len(s.Properties) > 0 && s.AdditionalProperties == nil {
		s.AdditionalProperties = &jsonschema.Schema{Not: &jsonschema.Schema{}}
	}
	closeObjects(s.Items)
	for _, p := range s.Properties {
		closeObjects(p)
	}
	for _, p := range s.AnyOf {
		closeObjects(p)
	}
}
