// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"runtime"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/audit"
	"github.com/cloister-build/cloister/worker/service"
	"github.com/spf13/cobra"
)

// Config is the flags of a machine that executes actions, from clients or from a scheduler.
type Config struct {
	Dir          string
	Jobs         int
	maxSize      flags.Size
	maxFiles     int64
	lease        flags.Duration
	Sync         bool
	scrub        flags.Rate
	trees        flags.Bytes
	memory       flags.Bytes
	Audit        flags.Limit
	Upstream     UpstreamFlags
	writePolicy  overlay.Policy
	DrainTimeout time.Duration
	metrics      string
	Sandbox      confinement.Flags
	toolchain    string // "": a fingerprint

	// Head: this machine executes nothing itself. Fleet: it is one of several machines among which a scheduler chooses.
	// Both follow from other flags.
	Head, Fleet bool
	// StrictProperties refuses platform properties that have no effect.
	StrictProperties bool
}

// NewConfig returns the defaults.
func NewConfig() Config {
	return Config{
		maxSize: flags.Size{Percent: 10}, lease: flags.Duration(disk.DefaultLease), trees: 512 << 20, memory: service.DefaultMemory,
		Audit: audit.DefaultBytes,
	}
}

// Register adds the flags.
func (c *Config) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.Dir, "dir", "", "directory of the store (default: cloister in the user's cache directory)")
	f.IntVar(&c.Jobs, "jobs", runtime.GOMAXPROCS(0), "number of concurrent actions")
	f.Var(&c.maxSize, "max-size", "size limit of the store, such as 50GiB or a percentage of the disk")
	f.Int64Var(&c.maxFiles, "max-files", 0, "limit for the number of files in the store (default: a tenth of the disk's)")
	f.Var(&c.lease, "lease", "minimum time that a used blob is kept; 0 means no lease")
	f.BoolVar(&c.Sync, "sync", false, "sync writes to the disk before acknowledging them, so that a power loss loses nothing")
	f.Var(&c.scrub, "scrub", "rate at which stored blobs are continuously re-read and verified; 0 disables it")
	f.Var(&c.trees, "mounted-trees", "size limit of the input trees that stay mounted for later actions; 0 mounts each tree anew")
	f.Var(&c.memory, "memory", "size limit of all caches in memory together; the metrics show the size of each")
	f.Var(&c.Audit, "audit-size", "size limit of the audit log; the oldest entries are deleted first; unlimited deletes none")
	f.StringVar(&c.metrics, "metrics", "", "address and port of /metrics for Prometheus, /ready and /live over HTTP (default: none)")
	f.DurationVar(&c.DrainTimeout, "drain-timeout", 10*time.Minute, "time limit of running actions after Ctrl-C")
	f.StringVar(&c.toolchain, "toolchain", "", "identity of this machine's toolchain, such as the digest of its image (default: a fingerprint of its files)")
	flags.Share(f, "toolchain")
	c.Sandbox.Register(cmd)
}

// ToolchainIDs matches the identity of a toolchain: a fingerprint, or what an operator declares.
var ToolchainIDs = regexp.MustCompile(`^[0-9A-Za-z][-0-9A-Za-z._:/@+]{0,199}$`)

// Check validates the flags.
func (c *Config) Check(cmd *cobra.Command) (err error) {
	switch {
	case c.Jobs < 0 || c.Jobs == 0 && !c.Head:
		return fmt.Errorf("--jobs %d: write 1 or more", c.Jobs)
	case c.maxFiles < 0:
		return fmt.Errorf("--max-files %d: write a positive number, or 0 for a tenth of the disk's", c.maxFiles)
	case c.lease > 0 && c.lease < flags.Duration(time.Second):
		return fmt.Errorf("--lease %s: write at least 1s, or 0 for no lease", &c.lease)
	case c.toolchain != "" && !ToolchainIDs.MatchString(c.toolchain):
		return fmt.Errorf("--toolchain %+.80q: write at most 200 letters, digits and -._:/@+, such as the digest of an image", c.toolchain)
	case c.memory < service.MinMemory:
		return fmt.Errorf("--memory %s: write at least %s", &c.memory, sandbox.Bytes(service.MinMemory))
	case c.Audit > 0 && c.Audit < audit.MinBytes:
		return fmt.Errorf("--audit-size %s: write at least %s, or %s", &c.Audit, sandbox.Bytes(audit.MinBytes), flags.Unlimited)
	}
	c.writePolicy, err = c.Upstream.policy(cmd)
	if c.writePolicy == overlay.WriteBack && c.lease == 0 {
		return errors.New("--cas-write back needs a --lease: blobs could be evicted before they are sent")
	}
	return err
}

// Renew returns the interval at which blobs still in use are marked as used, so that their leases do not end.
func (c *Config) Renew() time.Duration { return time.Duration(c.lease) / 3 }

// RunFlags returns the flags with which a command on this machine runs an action as this node does.
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
	return append(flags, c.Sandbox.ImageFlags()...)
}
