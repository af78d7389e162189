// SPDX-License-Identifier: Apache-2.0

package config

import (
	"regexp"

	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// A Value is the value of a key for one command.
type Value struct {
	Command string `json:"command"`
	Key     string `json:"key"`
	Value   string `json:"value"`  // "" for a computed default
	Origin  string `json:"origin"` // flag, env NAME, FILE:LINE, or default
}

// password matches a password in an address, which may be part of a list, or malformed.
var password = regexp.MustCompile(`(://[^/@:\s]*:)[^/\s]*@`)

// Values returns the values of all flags of a command that Load has configured.
func Values(cmd *cobra.Command) (all []Value) {
	each(cmd, func(f *pflag.Flag) {
		text := f.DefValue
		if f.Changed {
			text = f.Value.String()
		}
		// Credentials are in files of their own, but an address may contain a password.
		text = password.ReplaceAllString(text, "${1}xxxxx@")
		all = append(all, Value{cmd.Name(), f.Name, text, Origin(f)})
	})
	return all
}

// Schema returns the JSON schema of configuration files for the commands below root.
func Schema(root *cobra.Command) map[string]any {
	top := map[string]any{"version": map[string]any{"const": 1}}
	for _, c := range Commands(root) {
		section := map[string]any{}
		each(c, func(f *pflag.Flag) {
			if f.Name != "config" {
				section[f.Name] = schemaOf(f)
				top[f.Name] = section[f.Name] // commands agree about the form of a flag
			}
		})
		top[c.Name()] = object(section, "keys for cloister "+c.Name()+" alone")
	}
	schema := object(top, "configuration of cloister serve, join and runner")
	schema["$schema"], schema["required"] = "https://json-schema.org/draft/2020-12/schema", []string{"version"}
	return schema
}

func object(properties map[string]any, description string) map[string]any {
	return map[string]any{"type": "object", "description": description, "properties": properties, "additionalProperties": false}
}

func schemaOf(f *pflag.Flag) map[string]any {
	s := map[string]any{"description": f.Usage}
	scalar := map[string]any{"type": []string{"string", "number", "boolean"}}
	switch kind := f.Value.Type(); {
	case flags.IsRepeatable(f):
		list := map[string]any{"type": "array", "items": scalar, "minItems": 1}
		either := map[string]any{"anyOf": []any{scalar, list}}
		s["anyOf"] = []any{scalar, list, map[string]any{"type": "object", "additionalProperties": either, "minProperties": 1}}
	case kind == "bool":
		s["type"] = "boolean"
	case kind == "int" || kind == "int64" || kind == "uint32":
		s["type"] = "integer"
	default:
		s["type"] = []string{"string", "number"}
	}
	return s
}
