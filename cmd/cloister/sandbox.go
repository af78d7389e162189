// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
	"github.com/spf13/cobra"
)

// confinement is the flags that say how actions are confined.
type confinement struct {
	tier       string
	policy     string
	sourceTree string
}

func (c *confinement) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.tier, "sandbox", "full", "full, or namespaces: without system-call filter, Landlock and syscall monitor, for hosts that lack them")
	f.StringVar(&c.policy, "policy", "", "file that says what actions may be given (default: cloister policy explain)")
	f.StringVar(&c.sourceTree, "source-tree", "", "directory in which an action that is audited in full is told to find what it misses, below /build and below this path")
}

// backend returns what the flags say of the backend, before anything is made.
func (c *confinement) backend() (namespace.Config, error) {
	var config namespace.Config
	switch c.tier {
	case "full":
	case "namespaces":
		config.Without = namespace.NamespacesOnly
	default:
		return config, newExit(exitUsage, fmt.Errorf("--sandbox %q: there are full and namespaces", c.tier))
	}
	if c.sourceTree != "" {
		dir, err := filepath.Abs(c.sourceTree)
		if err != nil {
			return config, err
		}
		if st, err := os.Stat(dir); err != nil || !st.IsDir() {
			return config, newExit(exitUsage, fmt.Errorf("--source-tree %s: %w", dir, errors.Join(err, errors.New("not a directory"))))
		}
		config.Source = map[string]string{worker.ExecRoot: dir, dir: dir}
	}
	return config, nil
}

// rules returns the policy of the flags.
func (c *confinement) rules() (*policy.Policy, error) {
	if c.policy == "" {
		return policy.Default(), nil
	}
	return readPolicy("--policy", c.policy)
}

// banner prints how actions are confined.
func (c *confinement) banner(out io.Writer, f sandbox.Features, rules *policy.Policy) {
	fmt.Fprintf(out, "sandbox  %s   (%s)\n", strings.Join(f.Layers, ", "), f.Tier)
	var off []string
	for _, check := range f.Checks {
		if !check.OK {
			line := check.Name
			if check.Fix != "" {
				line += " (fix: " + check.Fix + ")"
			}
			off = append(off, line)
		}
	}
	if len(off) > 0 {
		fmt.Fprintf(out, "         not enforced: %s; cloister check says more\n", strings.Join(off, ", "))
	}
	if c.policy != "" {
		fmt.Fprintf(out, "policy   %s   (%.12s)\n", c.policy, rules.Hash())
	}
}
