// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"errors"
	"fmt"
	"regexp"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/spf13/cobra"
)

// limitFlags are the flags that stand for a platform property with one value.
var limitFlags = [...]struct{ name, property, usage string }{
	{"memory", "cloister-memory", "memory limit of all processes together, such as 8GiB"},
	{"cpu-time", "cloister-cpu", "limit of processor time, such as 10m"},
	{"cpus", "cloister-cpus", "number of processors that the command may keep busy, such as 1.5"},
	{"processes", "cloister-processes", "limit of processes and threads"},
	{"listen-loopback", listenProperty, "permit listening sockets"},
}

const (
	listenProperty  = "cloister-listen"
	networkProperty = "cloister-network"
)

// RegisterLimits adds the flags for limits and endpoints.
func (r *ActionFlags) RegisterLimits(cmd *cobra.Command) {
	f := cmd.Flags()
	for i, l := range limitFlags {
		usage := l.usage + " (default: the policy's)"
		if l.property == listenProperty {
			f.BoolFunc(l.name, usage, func(value string) error {
				if value != "true" && value != "false" {
					return errors.New("write true or false")
				}
				r.limits[i] = value
				return nil
			})
			flags.AllowEmpty(f, l.name) // a boolean has no text
			continue
		}
		f.StringVar(&r.limits[i], l.name, "", usage)
	}
	f.StringArrayVar(&r.allow, "allow", nil, "endpoint that the command may connect to, HOST:PORT; repeatable")
}

// checkLimits adds the properties that the flags stand for.
func (r *ActionFlags) checkLimits() error {
	for i, l := range limitFlags {
		if v := r.limits[i]; v != "" {
			r.property = append(r.property, l.property+"="+v)
		}
	}
	for _, text := range r.allow {
		e, err := sandbox.ParseEndpoint(text)
		if err != nil {
			return fmt.Errorf("--allow: %w", err)
		}
		r.Endpoints = append(r.Endpoints, e)
		r.property = append(r.property, networkProperty+"="+e.String())
	}
	return nil
}

// ExplainRefusal makes the policy's refusal of a flag's value a mistake in the command line. It returns other errors
// unchanged.
func (r *ActionFlags) ExplainRefusal(err error) error {
	refused, ok := errors.AsType[*policy.RefusedError](err)
	if !ok {
		return err
	}
	mistake := func(flag string) error {
		return exit.New(exit.Usage, fmt.Errorf("--%s %s: rule %q %s", flag, refused.Property.Value, refused.Rule, refused.Reason))
	}
	for i, l := range limitFlags {
		if l.property == refused.Property.Name && r.limits[i] != "" {
			return mistake(l.name)
		}
	}
	if refused.Property.Name == networkProperty && len(r.allow) > 0 {
		return mistake("allow")
	}
	return err
}

// execProperties matches the advice to request a resource in a message for clients.
var execProperties = regexp.MustCompile(`exec_properties = \{"([a-z-]+)": "(\w+)"\}`)

// AsFlags replaces that advice by flags.
func AsFlags(message string) string {
	message = execProperties.ReplaceAllString(message, "--property $1=$2")
	for _, l := range limitFlags {
		message = regexp.MustCompile(`--property `+l.property+`=(\w+)`).ReplaceAllString(message, "--"+l.name+" $1")
	}
	return message
}
