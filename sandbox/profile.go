// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// A Profile describes the needs of a typical command. ForBuild and ForTest turn it into a Spec with safe defaults.
type Profile struct {
	Args []string
	// Dir is the working directory. "" is the first of Outputs, or / if there is none.
	Dir string
	// Env adds to the variables of Environment.
	Env []string
	// Tools are the programs and libraries of this host that the command may use, such as HostToolchain.
	Tools []Input
	// Inputs are the files and directories that the command may read. They may lie inside Tools.
	Inputs []Input
	// Outputs are the directories that the command may write to and that remain after it. Each is a Target in the
	// sandbox; its Source is the same path in the workspace.
	Outputs []string
	// Network are the endpoints outside the sandbox that the command may reach.
	Network []Endpoint
}

// ForBuild returns a Spec for a build action: DefaultLimits (4 GiB of memory, one hour of processor time, 128
// processes), 4 GiB in /tmp, and no network except a private loopback interface and p.Network.
//
// An empty Source of a tool or input means its Target. ForBuild resolves symbolic links in sources; a missing source is
// fs.ErrNotExist. If p makes an invalid Spec, the error is ErrSpec. With p.Outputs, the caller sets Spec.Workspace to
// the name of a Workspace.
//
// Run refuses a limit that the host cannot enforce. Without a control group, as for most ordinary users, the caller
// sets the limits that Features lacks to Unlimited.
func ForBuild(p Profile) (*Spec, error) { return p.spec(DefaultLimits(), 4<<30) }

// ForTest is ForBuild for a test, which often starts servers and many threads: it permits 1024 processes and 8 GiB in
// /tmp.
func ForTest(p Profile) (*Spec, error) {
	limits := DefaultLimits()
	limits.Processes = 1024
	return p.spec(limits, 8<<30)
}

func (p *Profile) spec(limits Limits, tempBytes int64) (*Spec, error) {
	s := &Spec{
		Args:    slices.Clone(p.Args),
		Dir:     p.Dir,
		Env:     Environment(p.Env...),
		Temp:    []Temp{{Target: "/tmp", Bytes: tempBytes}},
		Network: Network{Loopback: true, Listen: true, Allow: slices.Clone(p.Network)},
		Limits:  limits,
	}
	slices.SortFunc(s.Network.Allow, func(a, b Endpoint) int { return strings.Compare(a.String(), b.String()) })
	s.Network.Allow = slices.Compact(s.Network.Allow)
	for _, target := range p.Outputs {
		s.Outputs = append(s.Outputs, Output{Target: target, Source: strings.TrimPrefix(target, "/")})
	}
	if s.Dir == "" {
		s.Dir = slices.Concat(p.Outputs, []string{"/"})[0]
	}
	for _, in := range slices.Concat(p.Tools, p.Inputs) {
		if err := in.followLinks(); err != nil {
			return nil, err
		}
		s.Inputs = append(s.Inputs, in)
	}
	complete := *s
	complete.Workspace = "set by the caller"
	return s, complete.Validate()
}

// followLinks sets a Source on this host to the path without symbolic links.
func (in *Input) followLinks() error {
	if in.Image != "" {
		return nil
	}
	if in.Source == "" {
		in.Source = in.Target
	}
	if !path.IsAbs(in.Source) {
		return nil
	}
	source, err := filepath.EvalSymlinks(in.Source)
	if err != nil {
		return fmt.Errorf("source %s of input %s: %w", in.Source, in.Target, err)
	}
	in.Source = source
	return nil
}

// Environment returns the variables that every action has (HOME, PATH and TMPDIR, on Windows also TEMP and TMP), changed
// by each of vars in order: "KEY=VALUE" sets a variable and "KEY" removes one. The result is sorted, as Spec.Env must
// be.
func Environment(vars ...string) []string {
	env := map[string]string{
		"HOME":   "/tmp",
		"PATH":   "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"TMPDIR": "/tmp",
	}
	if runtime.GOOS == "windows" {
		env["PATH"], env["TEMP"], env["TMP"] = `C:\Windows\System32;C:\Windows`, "/tmp", "/tmp"
	}
	for _, kv := range vars {
		if k, v, set := strings.Cut(kv, "="); set {
			env[k] = v
		} else {
			delete(env, k)
		}
	}
	sorted := make([]string, 0, len(env))
	for _, k := range slices.Sorted(maps.Keys(env)) {
		sorted = append(sorted, k+"="+env[k])
	}
	return sorted
}

// toolchainPaths are the parts of a host that contain compilers, interpreters and shells, and no data of
// administrators, users or services.
var toolchainPaths = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
	"/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
	"/etc/java-*", "/etc/python3*", "/etc/perl",
	"/etc/mime.types", "/etc/protocols", "/etc/services",
}

// HostToolchain returns the parts of this host that every action may read: the directories of programs and libraries,
// and the few files in /etc that these need.
func HostToolchain() ([]Input, error) { return hostPaths(toolchainOf(runtime.GOOS)) }

// toolchainOf returns the patterns of toolchain paths on an operating system.
func toolchainOf(system string) []string {
	if system == "darwin" {
		return append(slices.Clip(toolchainPaths), "/Library/Developer/CommandLineTools")
	}
	return toolchainPaths
}

// certificatePaths are where distributions keep the CA certificates that TLS clients trust; private keys are elsewhere.
// Debian's /etc/ssl/certs has links into /usr/share and /usr/local/share, which are toolchainPaths. Fedora's is itself
// a link, and the files that it leads to are links into /etc/pki/ca-trust.
var certificatePaths = []string{
	"/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem",
	"/etc/pki/tls/certs", "/etc/pki/tls/cert.pem", "/etc/pki/ca-trust/extracted", "/etc/ca-certificates/extracted",
}

// HostCertificates returns the CA certificates that this host trusts, for actions that may reach endpoints outside the
// sandbox.
func HostCertificates() ([]Input, error) { return hostPaths(certificatePaths) }

// hostPaths returns the paths of this host that match patterns.
func hostPaths(patterns []string) ([]Input, error) {
	inputs := []Input{}
	for _, pattern := range patterns {
		if !filepath.IsAbs(pattern) { // on Windows, where it would be on any drive
			continue
		}
		matches, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, target := range matches {
			in := Input{Target: target, Content: "host"}
			err := in.followLinks()
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			inputs = append(inputs, in)
		}
	}
	return inputs, nil
}
