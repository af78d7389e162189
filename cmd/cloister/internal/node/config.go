// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/audit"
	"github.com/spf13/cobra"
)

// Config is what the flags say of a machine that executes actions, whoever hands them to it.
type Config struct {
	Dir          string
	Jobs         int
	maxSize      flags.Size
	maxFiles     int64
	lease        flags.Duration
	Sync         bool
	scrub        flags.Rate
	trees        flags.Bytes
	Audit        flags.Limit
	Upstream     UpstreamFlags
	writePolicy  overlay.Policy
	DrainTimeout time.Duration
	metrics      string
	Sandbox      confinement.Flags

	// head says that it executes nothing itself, and fleet that it is one of several machines among which a scheduler
	// chooses. No flag says so.
	Head, Fleet bool
}

// NewConfig returns the defaults.
func NewConfig() Config {
	return Config{maxSize: flags.Size{Percent: 10}, lease: flags.Duration(disk.DefaultLease), trees: 512 << 20, Audit: audit.DefaultBytes}
}

func (c *Config) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.Dir, "dir", "", "directory of the store (default: cloister in the user's cache directory)")
	f.IntVar(&c.Jobs, "jobs", runtime.GOMAXPROCS(0), "how many actions run at once")
	f.Var(&c.maxSize, "max-size", "size of the store, in bytes with a unit or as a share of the disk")
	f.Int64Var(&c.maxFiles, "max-files", 0, "files of the store (default: a tenth of what the disk can hold)")
	f.Var(&c.lease, "lease", "how long a blob stays at least after it was used; 0 promises nothing")
	f.BoolVar(&c.Sync, "sync", false, "write to the disk before a write is answered, so that a loss of power loses nothing")
	f.Var(&c.scrub, "scrub", "read everything again and again at this rate, and compare it with its digest; 0 is never")
	f.Var(&c.trees, "mounted-trees", "bytes of input directories that stay mounted because several actions have them; what is read of them is in the operating system's cache; 0 mounts each anew")
	f.Var(&c.Audit, "audit-size", "size of the record of what actions tried; the oldest goes first, and the record says so; unlimited keeps everything")
	f.StringVar(&c.metrics, "metrics", "", "address and port that serve /metrics for Prometheus, /ready and /live over HTTP (default: none)")
	f.DurationVar(&c.DrainTimeout, "drain-timeout", 10*time.Minute, "how long running actions may take after Ctrl-C")
	c.Sandbox.Register(cmd)
}

// Check returns what is wrong with the command line, before anything is made.
func (c *Config) Check(cmd *cobra.Command) (err error) {
	switch {
	case c.Jobs < 0 || c.Jobs == 0 && !c.Head:
		return fmt.Errorf("--jobs %d: at least one action must be able to run", c.Jobs)
	case c.maxFiles < 0:
		return fmt.Errorf("--max-files %d: write a positive number, or 0 for a tenth of what the disk can hold", c.maxFiles)
	case c.lease > 0 && c.lease < flags.Duration(time.Second):
		return fmt.Errorf("--lease %s: write at least 1s, or 0 to promise nothing", &c.lease)
	case c.Audit > 0 && c.Audit < audit.LeastBytes:
		return fmt.Errorf("--audit-size %s: write at least %s, or %s", &c.Audit, sandbox.Bytes(audit.LeastBytes), flags.Unlimited)
	}
	c.writePolicy, err = c.Upstream.policy(cmd)
	if c.writePolicy == overlay.WriteBack && c.lease == 0 {
		return errors.New("--cas-write back needs a --lease: what is yet to be sent could be evicted before")
	}
	return err
}

// Renew returns how often what is still needed is marked as used, so that its lease does not end.
func (c *Config) Renew() time.Duration { return time.Duration(c.lease) / 3 }

// RunFlags returns what a command on this machine must be told to run an action as this node does.
func (c *Config) RunFlags() []string {
	var flags []string
	if c.Sandbox.Policy != "" {
		file, err := filepath.Abs(c.Sandbox.Policy)
		if err != nil {
			file = c.Sandbox.Policy
		}
		flags = append(flags, "--policy", file)
	}
	if c.Sandbox.Tier != "full" {
		flags = append(flags, "--sandbox", c.Sandbox.Tier)
	}
	return flags
}
