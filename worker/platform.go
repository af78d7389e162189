// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker/internal/results"
)

// This machine takes every action, so it must not ignore a property that would give the action another operating
// system, architecture or root file system. A worker among others gets only what its properties match, which its
// operator chose.

// checkPlatform returns a Fault of kind FaultUnmet for an action whose properties this machine does not have, and adds
// the properties that are ignored to the request.
func (l *Local) checkPlatform(req *request) error {
	for _, p := range l.cfg.Policy.Properties(policy.Request{Instance: req.Instance.Name, Properties: req.properties()}) {
		switch names, differs := hostProperty(p, runtime.GOARCH); {
		case isSetting(p.Name) || IsPlacement(p.Name) || names && !differs:
		case l.persistent != nil && isPersistentProperty(p.Name):
		case p.Name == propertyRemoteAPIs:
		case differs:
			return faultf(FaultUnmet, "fetch: action %s needs %s, but this machine is %s: use a server for that platform, or "+
				"correct the property", req.Digest, p, host)
		case isImage(p) && (l.cfg.Images != nil || noImage(p.Value)):
		case strings.EqualFold(p.Name, networkProperty) && strings.EqualFold(p.Value, "off"):
		case asksForNetwork(p): // see checkNetwork
		case isImage(p) && !l.cfg.IgnoreImages:
			return faultf(FaultUnmet, "fetch: action %s names a container image (%s), and this worker runs none: "+
				"use another server, or one that ignores images and has the same toolchain", req.Digest, p)
		case strings.EqualFold(p.Name, "dockerPrivileged") && strings.EqualFold(p.Value, "true"):
			return faultf(FaultUnmet, "fetch: action %s needs %s, which is never granted", req.Digest, p)
		default:
			if err := l.ignore(req, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// networkProperty is the platform property with which clients of other servers ask for the network: "standard" or "off".
const networkProperty = "dockerNetwork"

// asksForNetwork reports whether a property asks for the network that the policy permits.
func asksForNetwork(p Property) bool {
	return strings.EqualFold(p.Name, networkProperty) && strings.EqualFold(p.Value, "standard")
}

// checkNetwork ignores the property that asks for the network if the policy permits none.
func (l *Local) checkNetwork(t *Task, req *request, g *policy.Grant) error {
	if l.cfg.Fleet || len(g.Network.Allow) > 0 {
		return nil
	}
	for _, p := range l.cfg.Policy.Properties(req.ask(t)) {
		if asksForNetwork(p) {
			return l.ignore(req, p)
		}
	}
	return nil
}

// ignore adds a property without effect to the request and warns once about its name (rule 84): a single machine serves
// every platform. With StrictProperties it returns a Fault.
func (l *Local) ignore(req *request, p Property) error {
	if l.cfg.StrictProperties && !isImage(p) {
		return faultf(FaultUnmet, "fetch: action %s has the unknown property %s, which --strict-properties refuses", req.Digest, p)
	}
	switch text := p.String(); {
	case slices.Contains(req.ignored, text):
	case len(req.ignored) < maxIgnoredProperties:
		req.ignored = append(req.ignored, text)
	case isImage(p) && !req.ignoresImage: // results.IgnoredImage must find it
		req.ignored[len(req.ignored)-1] = text
	}
	req.ignoresImage = req.ignoresImage || isImage(p)
	l.mu.Lock()
	first := len(l.ignored) < maxIgnored && !l.ignored[p.Name]
	if first {
		l.ignored[p.Name] = true
	}
	l.mu.Unlock()
	if first {
		l.cfg.Log.Warn("platform property is ignored: this worker takes every action", "name", p.Name, "value", p.Value)
	}
	return nil
}

// maxIgnored bounds the number of remembered property names, which clients choose.
const maxIgnored = 100

// maxIgnoredProperties is the number of ignored properties that a result lists.
const maxIgnoredProperties = 20

// isImage reports whether a property names a container image. Clients differ in the case of its letters.
func isImage(p Property) bool { return strings.EqualFold(p.Name, results.ImageProperty) }

// noImage reports whether an image is none.
func noImage(value string) bool { return value == "" || strings.EqualFold(value, results.NoImage) }

// host is the platform of this machine, for messages.
const host = runtime.GOOS + "/" + runtime.GOARCH

// architectures maps other names of architectures to Go's: those of the Remote Execution API's lexicon, of Bazel's
// --cpu, and of uname.
var architectures = map[string]string{
	"x86-64": "amd64", "x86_64": "amd64", "k8": "amd64", "x64": "amd64", "amd64": "amd64",
	"x86-32": "386", "i386": "386", "i686": "386", "386": "386",
	"arm-a64": "arm64", "aarch64": "arm64", "arm-v8": "arm64", "armv8": "arm64", "arm64": "arm64", "arm64-v8a": "arm64",
	"arm-a64-be": "arm64be",
	"arm-a32":    "arm", "arm-t32": "arm", "armeabi-v7a": "arm", "armv7": "arm", "armv6": "arm", "arm": "arm",
	"arm-a32-be": "armbe", "arm-t32-be": "armbe",
	"rv32g": "riscv32", "rv64g": "riscv64", "riscv64": "riscv64", "la64v100": "loong64", "loong64": "loong64",
	"power-isa-le": "ppc64le", "ppc64le": "ppc64le", "ppc": "ppc64le", "power-isa-be": "ppc64", "ppc64": "ppc64",
	"s390x": "s390x", "sparc-v9": "sparc64", "darwin_arm64": "arm64", "darwin_x86_64": "amd64",
}

// extensions maps Go's names of architectures to the prefixes of their instruction set extensions in the lexicon.
var extensions = map[string]string{"amd64": "x86-", "386": "x86-", "arm64": "arm-", "arm": "arm-"}

// hostProperty reports whether a property states the operating system or the architecture, and whether it is not that
// of this machine, whose architecture is goarch. An instruction set extension in ISA states neither, nor does a number,
// which counts processors.
func hostProperty(p Property, goarch string) (names, differs bool) {
	value := strings.ToLower(p.Value)
	switch name := strings.ToLower(p.Name); name {
	case "osfamily", "os":
		if value == "macos" {
			value = "darwin"
		}
		return true, value != "" && value != runtime.GOOS
	case "isa", "arch", "cpu":
		if arch := architectures[value]; arch != "" {
			return true, arch != goarch
		}
		prefix := extensions[goarch]
		extension := name == "isa" && prefix != "" && strings.HasPrefix(value, prefix)
		_, err := strconv.ParseFloat(value, 64)
		return value == "", value != "" && err != nil && !extension
	}
	return false, false
}

// ignoredLine returns the line of a message about ignored properties, for the first result of each kind of action, or
// "".
func (l *Local) ignoredLine(t *Task, req *request) string {
	if len(req.ignored) == 0 {
		return ""
	}
	line := "ignored platform properties: " + strings.Join(req.ignored, ", ")
	if req.ignoresImage && !req.root.own() {
		line += "; the action ran with the toolchain of this machine instead of the image's"
	}
	key := fmt.Sprintf("%q %s", t.Mnemonic, line)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mentioned[key] {
		return ""
	}
	if len(l.mentioned) >= maxMentioned {
		clear(l.mentioned)
	}
	l.mentioned[key] = true
	return line
}

// maxMentioned bounds the number of remembered lines about properties, which clients choose.
const maxMentioned = 1000
