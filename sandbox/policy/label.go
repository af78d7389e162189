// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// A pattern matches target labels: one label, all targets of a package, or all targets below a package.
type pattern struct {
	repo, pkg string
	name      string // "" if below, "all" for every target of the package
	below     bool
}

// splitLabel splits "//pkg:name", "//pkg", "@repo//pkg:name" and "@@repo//pkg:name". The main repository is "". Clients
// write one or two signs before a repository, with the same meaning.
func splitLabel(s string) (repo, rest string, ok bool) {
	repo, rest, ok = strings.Cut(s, "//")
	name := strings.TrimPrefix(strings.TrimPrefix(repo, "@"), "@")
	return name, rest, ok && (repo == "" || name != repo) && !strings.ContainsAny(name, "@/:")
}

// splitTarget splits "pkg:name". The default name is the last element of the package.
func splitTarget(s string) (pkg, name string) {
	pkg, name, ok := strings.Cut(s, ":")
	if !ok {
		name = path.Base(pkg)
	}
	return pkg, name
}

func parsePattern(s string) (*pattern, error) {
	bad := fmt.Errorf("invalid target pattern %q: write //pkg:name, //pkg:all or //pkg/..., "+
		"preceded by @@repo for another repository", s)
	repo, rest, ok := splitLabel(s)
	if !ok {
		return nil, bad
	}
	p := &pattern{repo: repo}
	if rest == "..." {
		p.below = true
		return p, nil
	}
	if p.pkg, p.below = strings.CutSuffix(rest, "/..."); !p.below {
		p.pkg, p.name = splitTarget(rest)
		if p.name == "" || strings.Contains(p.name, "*") || p.name == "." {
			return nil, bad
		}
	}
	elements := strings.Split(p.pkg, "/")
	if p.pkg == "" && !p.below {
		elements = nil // the package at the root
	}
	for _, none := range []string{"", ".", "..", "..."} {
		if slices.Contains(elements, none) || strings.Contains(p.pkg, ":") {
			return nil, bad
		}
	}
	return p, nil
}

// matches reports whether p covers label. A malformed label matches nothing.
func (p *pattern) matches(label string) bool {
	repo, rest, ok := splitLabel(label)
	if !ok || repo != p.repo {
		return false
	}
	pkg, name := splitTarget(rest)
	if p.below {
		return p.pkg == "" || pkg == p.pkg || strings.HasPrefix(pkg, p.pkg+"/")
	}
	return pkg == p.pkg && (p.name == "all" || name == p.name)
}

func (p *pattern) String() string {
	s := "//" + p.pkg
	if p.repo != "" {
		s = "@@" + p.repo + s
	}
	switch {
	case p.below && p.pkg == "":
		return s + "..."
	case p.below:
		return s + "/..."
	}
	return s + ":" + p.name
}
