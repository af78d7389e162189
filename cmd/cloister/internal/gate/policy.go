// SPDX-License-Identifier: Apache-2.0

// Package gate carries out cloister gate: it runs the steps of a policy file in the sandbox, decides whether they were
// hermetic, and leaves evidence (docs/gate.md).
package gate

import (
	"cmp"
	"crypto/sha256"
	_ "embed" // for Schema
	"encoding/hex"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/policy/strict"
)

// Schema is the JSON schema of policy files, for editors.
//
//go:embed schema.json
var Schema string

// A gatePolicy is a parsed policy file.
type gatePolicy struct {
	sum      string // SHA-256 of the file
	steps    []*step
	parallel int // maximum number of steps at a time
}

// A step is a command that must be hermetic.
type step struct {
	id        string
	line      int // in the policy file
	command   []string
	env       []string // KEY=VALUE
	listen    bool     // on loopback
	revision  string   // "" is the gate's
	directory string   // instead of a revision
	timeout   time.Duration
	limits    []policy.Property
	hosts     []*exception
	ports     []*exception
}

// An exception authorises a host, or a port of such hosts, until a day.
type exception struct {
	host    string
	port    uint16
	owner   string
	reason  string
	expires time.Time
	line    int
}

// name returns the host or the port.
func (e *exception) name() string {
	return cmp.Or(e.host, fmt.Sprint("port ", e.port))
}

// expired reports whether the last day of the exception is before today.
func (e *exception) expired(today time.Time) bool { return e.expires.Before(today) }

// endpoints returns the endpoints that the unexpired exceptions allow: each host at each port.
func (s *step) endpoints(today time.Time) []sandbox.Endpoint {
	var all []sandbox.Endpoint
	ports := s.ports
	if len(ports) == 0 {
		ports = []*exception{{port: defaultPort, expires: today}}
	}
	for _, h := range s.hosts {
		for _, p := range ports {
			if !h.expired(today) && !p.expired(today) {
				all = append(all, sandbox.Endpoint{Host: h.host, Port: p.port})
			}
		}
	}
	return all
}

const (
	defaultTimeout = time.Hour
	defaultPort    = 443
	maxParallel    = 64
	// noListen is the variable that steps and their tools read. Its value "0" in a policy permits listening.
	noListen = "NO_NETWORK_LISTEN"
)

var (
	stepID   = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
	variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// limitKeys are the limits of a step, named as in the policy of actions (docs/policy.md).
var limitKeys = []string{"cpu", "cpus", "disk_rate", "memory", "open_files", "output_bytes", "output_files", "processes", "tmp"}

// content matches a line that is neither empty nor a comment.
var content = regexp.MustCompile(`(?m)^\s*[^\s#]`)

// smallest is the smallest policy.
const smallest = "hermetic_steps: [{id: NAME, command: [PROGRAM]}]"

// parsePolicy parses the text of a policy file. Every error names the file and the position.
func parsePolicy(file string, text []byte) (*gatePolicy, error) {
	sum := sha256.Sum256(text)
	r := &reader{Decoder: strict.NewDecoder(file, "a policy", text)}
	p := &gatePolicy{sum: hex.EncodeToString(sum[:]), parallel: 1}
	if content.Find(text) == nil {
		return nil, fmt.Errorf("%s: [1:1] the file is empty: write %s", file, smallest)
	}
	root, err := r.Parse(text)
	if err != nil {
		return nil, err
	}
	err = r.Mapping(root, strict.Keys{
		"hermetic_steps": func(n *strict.Node) error {
			return r.Sequence(n, func(n *strict.Node) error {
				s, err := r.step(n, p.steps)
				p.steps = append(p.steps, s)
				return err
			})
		},
		"parallel": func(n *strict.Node) error {
			text, err := r.Scalar(n)
			if err != nil {
				return err
			}
			if p.parallel, err = strconv.Atoi(text); err != nil || p.parallel < 1 || p.parallel > maxParallel {
				return r.Errorf(n, "invalid number %q: write the number of steps at a time, from 1 to %d", text, maxParallel)
			}
			return nil
		},
	})
	if err == nil && len(p.steps) == 0 {
		err = r.Errorf(root, "no step: write %s", smallest)
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// A reader decodes a policy file.
type reader struct{ *strict.Decoder }

// line returns the line of a node.
func (r *reader) line(n *strict.Node) int {
	at := r.At(n)
	line, _ := strconv.Atoi(at[strings.LastIndexByte(at, ':')+1:])
	return line
}

// text returns a function that decodes a non-empty scalar.
func (r *reader) text(to *string) func(*strict.Node) error {
	return func(n *strict.Node) (err error) {
		if *to, err = r.Scalar(n); err == nil && strings.TrimSpace(*to) == "" {
			err = r.Errorf(n, "the value is empty")
		}
		return err
	}
}

// step decodes a step; before are the steps above it.
func (r *reader) step(n *strict.Node, before []*step) (*step, error) {
	s := &step{line: r.line(n), timeout: defaultTimeout}
	err := r.Mapping(n, strict.Keys{
		"id": func(n *strict.Node) (err error) {
			if s.id, err = r.Scalar(n); err != nil {
				return err
			}
			if !stepID.MatchString(s.id) {
				return r.Errorf(n, "invalid id %q: write at most 64 letters, digits, '.', '_' and '-'", s.id)
			}
			if i := slices.IndexFunc(before, func(o *step) bool { return strings.EqualFold(o.id, s.id) }); i >= 0 {
				return r.Errorf(n, "duplicate id %q: the step of line %d has it", s.id, before[i].line)
			}
			return nil
		},
		"command": func(n *strict.Node) error {
			return r.Sequence(n, func(n *strict.Node) error {
				word, err := r.Scalar(n)
				s.command = append(s.command, word)
				return err
			})
		},
		"env":    func(n *strict.Node) error { return r.env(n, s) },
		"inputs": func(n *strict.Node) error { return r.inputs(n, s) },
		"timeout": func(n *strict.Node) error {
			text, err := r.Scalar(n)
			if err != nil {
				return err
			}
			if s.timeout, err = time.ParseDuration(text); err != nil || s.timeout <= 0 {
				return r.Errorf(n, "invalid timeout %q: write a number with a unit, such as 20m", text)
			}
			return nil
		},
		"limits": func(n *strict.Node) error { return r.limits(n, s) },
		"allow":  func(n *strict.Node) error { return r.allow(n, s) },
	})
	switch {
	case err != nil:
		return nil, err
	case s.id == "":
		return nil, r.Errorf(n, "the step has no id: write id: NAME")
	case len(s.command) == 0 || s.command[0] == "":
		return nil, r.Errorf(n, "step %s has no command: write command: [PROGRAM, ARGUMENT]", s.id)
	}
	return s, nil
}

func (r *reader) env(n *strict.Node, s *step) error {
	return r.Entries(n, func(name string, key, value *strict.Node) error {
		v, err := r.Scalar(value)
		switch {
		case err != nil:
			return err
		case !variable.MatchString(name):
			return r.Errorf(key, "invalid variable name %q", name)
		case name == noListen && v != "0" && v != "1":
			return r.Errorf(value, "%s is %q: write \"1\" to forbid listening sockets, or \"0\" to permit them on loopback",
				noListen, v)
		}
		s.listen = s.listen || name == noListen && v == "0"
		s.env = append(s.env, name+"="+v)
		return nil
	})
}

func (r *reader) inputs(n *strict.Node, s *step) error {
	err := r.Mapping(n, strict.Keys{"revision": r.text(&s.revision), "directory": r.text(&s.directory)})
	switch {
	case err != nil:
		return err
	case (s.revision == "") == (s.directory == ""):
		return r.Errorf(n, "write either revision: NAME or directory: PATH")
	case s.directory != "" && !filepath.IsLocal(s.directory):
		return r.Errorf(n, "directory %q: write a path below the working directory", s.directory)
	}
	return nil
}

func (r *reader) limits(n *strict.Node, s *step) error {
	return r.Entries(n, func(name string, key, value *strict.Node) error {
		if !slices.Contains(limitKeys, name) {
			return r.Unknown(key, "limit", name, limitKeys)
		}
		v, err := r.Scalar(value)
		if err != nil {
			return err
		}
		p := policy.Property{Name: "cloister-" + strings.ReplaceAll(name, "_", "-"), Value: v}
		if _, err := grant([]policy.Property{p}, sandbox.AllLimits); err != nil {
			return r.Errorf(value, "%s: %v", name, err)
		}
		s.limits = append(s.limits, p)
		return nil
	})
}

// grant returns the limits of a test on this machine, as changed by properties.
func grant(properties []policy.Property, enforceable []sandbox.Limit) (*policy.Grant, error) {
	return confinement.DefaultPolicy().Compile(policy.Request{Mnemonic: "TestRunner", Properties: properties}, enforceable)
}

func (r *reader) allow(n *strict.Node, s *step) error {
	var ports *strict.Node
	list := func(key string, to *[]*exception) func(*strict.Node) error {
		return func(n *strict.Node) error {
			if key == "port" {
				ports = n
			}
			return r.Sequence(n, func(n *strict.Node) error {
				e, err := r.exception(n, key)
				if err != nil {
					return err
				}
				if i := slices.IndexFunc(*to, func(o *exception) bool { return o.name() == e.name() }); i >= 0 {
					return r.Errorf(n, "duplicate exception for %s: line %d has one", e.name(), (*to)[i].line)
				}
				*to = append(*to, e)
				return nil
			})
		}
	}
	err := r.Mapping(n, strict.Keys{"outbound_hosts": list("host", &s.hosts), "outbound_ports": list("port", &s.ports)})
	if err == nil && ports != nil && len(s.hosts) == 0 {
		err = r.Errorf(ports, "step %s has outbound_ports without outbound_hosts: write the hosts", s.id)
	}
	return err
}

// exception decodes an exception for a host or a port.
func (r *reader) exception(n *strict.Node, key string) (*exception, error) {
	e := &exception{line: r.line(n)}
	keys := strict.Keys{
		"owner": r.text(&e.owner), "reason": r.text(&e.reason),
		"expires": func(n *strict.Node) error {
			text, err := r.Scalar(n)
			if err != nil {
				return err
			}
			if e.expires, err = time.Parse(time.DateOnly, text); err != nil {
				return r.Errorf(n, "invalid day %q: write the last day of the exception as YYYY-MM-DD", text)
			}
			return nil
		},
	}
	if key == "host" {
		keys[key] = func(n *strict.Node) error { return r.host(n, e) }
	} else {
		keys[key] = func(n *strict.Node) error {
			text, err := r.Scalar(n)
			if err != nil {
				return err
			}
			port, err := strconv.ParseUint(text, 10, 16)
			if e.port = uint16(port); err != nil || port == 0 {
				return r.Errorf(n, "invalid port %q: write a number from 1 to 65535", text)
			}
			return nil
		}
	}
	if err := r.Mapping(n, keys); err != nil {
		return nil, err
	}
	for _, field := range []struct {
		name    string
		missing bool
	}{
		{key, e.host == "" && e.port == 0},
		{"owner", e.owner == ""},
		{"reason", e.reason == ""},
		{"expires", e.expires.IsZero()},
	} {
		if field.missing {
			return nil, r.Errorf(n, "the exception has no %s: an exception states %s, owner, reason and expires",
				field.name, key)
		}
	}
	return e, nil
}

// host decodes a host, which is compared literally.
func (r *reader) host(n *strict.Node, e *exception) error {
	text, err := r.Scalar(n)
	if err != nil {
		return err
	}
	bare := text
	if _, rest, ok := strings.Cut(bare, "://"); ok {
		bare = rest
	}
	bare, _, _ = strings.Cut(bare, "/")
	bare, _, _ = strings.Cut(bare, ":")
	bare = strings.ToLower(bare)
	end, err := sandbox.ParseEndpoint(bare + ":1")
	_, ipErr := netip.ParseAddr(text)
	switch {
	case err != nil || ipErr == nil && bare != text:
		return r.Errorf(n, "invalid host %q: write a lower-case host name or an IPv4 address of another host", text)
	case bare != text:
		return r.Errorf(n, "invalid host %q: did you mean %q? Ports are in outbound_ports", text, bare)
	}
	e.host = end.Host
	return nil
}
