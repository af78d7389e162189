// SPDX-License-Identifier: Apache-2.0

package seatbelt

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/placement"
)

// systemPaths are what every program reads before main: the dynamic linker and its caches, the system's libraries, the
// time zones, and the link that selects /bin/sh.
var systemPaths = []string{
	"/System/Library", "/System/Volumes/Preboot/Cryptexes/OS", "/private/preboot/Cryptexes/OS", "/private/var/db/dyld",
	"/private/var/db/timezone", "/private/var/select", "/usr/lib", "/usr/share/locale", "/usr/share/zoneinfo",
	"/Library/Apple/usr/libexec/oah", "/Library/Apple/System/Library",
}

// devices are those that a run may use. The null device and descriptors are also writable.
var devices = []string{"/dev/random", "/dev/urandom", "/dev/zero"}

// sysctls and sysctlPrefixes describe the machine and the system, and the limits of programs. Those below kern.proc,
// kern.procargs and net describe other processes, with their environments, and the network.
var (
	sysctls = []string{
		"kern.argmax", "kern.boottime", "kern.hostname", "kern.iossupportversion", "kern.maxfiles", "kern.maxfilesperproc",
		"kern.maxproc", "kern.ngroups", "kern.osproductversion", "kern.osrelease", "kern.ostype", "kern.osvariant_status",
		"kern.osversion", "kern.secure_kernel", "kern.usrstack64", "kern.version", "security.mac.lockdown_mode_state",
		"sysctl.proc_cputype", "sysctl.proc_translated", "vm.loadavg",
	}
	sysctlPrefixes = []string{"hw.", "machdep.cpu."}
)

// systemLinks are links of the root directory through which programs name the directories below /private.
var systemLinks = []string{"/etc", "/tmp", "/var"}

// Profile returns the profile of a run in SBPL, the language of sandbox-exec. Of several rules that match an operation,
// the last decides.
func Profile(r *placement.Run, n *sandbox.Network) string {
	var p profile
	p.line(`(version 1)`)
	p.line(`(deny default)`)
	p.line(`(allow process-fork)`)
	p.line(`; (deny default) does not apply to these`)
	p.line(`(deny process-info* nvram* iokit-get-properties file-map-executable)`)
	p.line(`(allow signal process-info* (target same-sandbox))`)
	p.rule("allow sysctl-read", "sysctl-name", sysctls)
	p.rule("allow sysctl-read", "sysctl-name-prefix", sysctlPrefixes)
	p.line(`; the C library looks up users here`)
	p.line(`(allow mach-lookup (global-name "com.apple.system.opendirectoryd.libinfo"))`)

	p.line(`; the system, inputs and outputs; the way to them is visible, but not what else is there`)
	readable := slices.Concat(systemPaths, r.Readable, r.Writable)
	before := []string{shell, setEnv}
	p.rule("allow file-read-metadata", "literal", slices.Concat(systemLinks, parents(readable), parents(before)))
	p.rule("allow file-read* file-map-executable process-exec", "subpath", readable)
	p.rule("allow file-read* file-map-executable process-exec", "literal", before)
	p.rule("allow file-read*", "literal", slices.Concat([]string{"/"}, devices))
	p.line(`(allow file-read* file-write-data file-ioctl (literal "/dev/null") (literal "/dev/dtracehelper") (subpath "/dev/fd"))`)

	p.line(`; outputs and temporary directories`)
	p.rule("allow file-write*", "subpath", r.Writable)
	p.line(`(deny file-write-setugid)`)
	p.line(`(deny file-write-create (vnode-type BLOCK-DEVICE) (vnode-type CHARACTER-DEVICE))`)
	p.line(`; inputs in outputs; the directories with them cannot be moved away`)
	p.rule("deny file-write* file-link", "literal", r.Fixed)
	p.rule("deny file-write-unlink", "literal", slices.Concat(r.Holders, r.Writable))

	p.network(n)
	return p.String()
}

// A profile is the text of a profile.
type profile struct{ strings.Builder }

func (p *profile) line(text string) { p.WriteString(text + "\n") }

// network adds the rules for the network: none without loopback.
func (p *profile) network(n *sandbox.Network) {
	if !n.Loopback {
		p.line(`; no network: (deny default)`)
		return
	}
	p.line(`; loopback of this host`)
	p.line(`(allow system-socket (require-any (socket-domain AF_INET) (socket-domain AF_INET6)))`)
	p.line(`(allow network-outbound (remote ip "localhost:*"))`)
	if n.Listen {
		p.line(`(allow network-bind network-inbound (local ip "localhost:*"))`)
	}
}

// rule adds a rule for names, or nothing without names, since such a rule would match every name.
func (p *profile) rule(head, filter string, names []string) {
	if len(names) == 0 {
		return
	}
	names = slices.Clone(names)
	slices.Sort(names)
	p.line("(" + head)
	for _, name := range slices.Compact(names) {
		p.line(fmt.Sprintf("  (%s %s)", filter, quote(name)))
	}
	p.line(")")
}

// quote returns a name as a string of SBPL, a dialect of Scheme.
func quote(p string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(p) + `"`
}

// parents returns the directories above paths.
func parents(paths []string) []string {
	all := map[string]bool{}
	for _, p := range paths {
		for dir := path.Dir(p); !all[dir]; dir = path.Dir(dir) {
			all[dir] = true
		}
	}
	return slices.Collect(maps.Keys(all))
}
