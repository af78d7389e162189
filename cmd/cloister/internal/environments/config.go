// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"errors"
	"fmt"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/spf13/cobra"
)

// Config is the flags of a new sandbox.
type Config struct {
	localworker.ActionFlags
	Sandbox     confinement.Flags
	Name        string // "" for a random one
	Volumes     []string
	IdleTimeout time.Duration
	Lifetime    time.Duration

	volumes []sandbox.Input // set by Check
}

// Register adds the flags.
func (c *Config) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	c.Lasting = true
	c.RegisterInputs(cmd)
	c.RegisterRoot(cmd)
	c.RegisterImage(cmd)
	c.RegisterLimits(cmd)
	c.Sandbox.Register(cmd)
	c.Sandbox.RegisterImages(cmd)
	f.StringArrayVar(&c.Volumes, "volume", nil, "file or directory of this host to show read-only in the sandbox, HOST:GUEST[:ro]; repeatable")
	f.StringVar(&c.Name, "name", "", "name of the sandbox (default: a random one)")
	f.DurationVar(&c.IdleTimeout, "idle-timeout", time.Hour, "time without a command after which the sandbox ends; 0 is unlimited")
	f.DurationVar(&c.Lifetime, "lifetime", 24*time.Hour, "time after which the sandbox ends")
}

// Check validates the flags.
func (c *Config) Check() error {
	switch {
	case c.IdleTimeout < 0:
		return fmt.Errorf("--idle-timeout %v: write a positive time, or 0 for none", c.IdleTimeout)
	case c.Lifetime <= 0:
		return fmt.Errorf("--lifetime %v: write a positive time", c.Lifetime)
	}
	if c.Name != "" {
		if err := CheckName(c.Name); err != nil {
			return err
		}
	}
	var err error
	switch c.volumes, err = volumes(c.Volumes); {
	case err != nil:
		return err
	case len(c.volumes) > 0 && c.RootName() != "":
		return errors.New("--volume needs the root file system of the host's toolchain: omit --image and --root, or copy the files with cloister sandbox cp")
	}
	if _, err := c.Sandbox.BackendConfig(); err != nil {
		return err
	}
	c.Timeout = c.Lifetime
	if err := c.ActionFlags.Check(); err != nil {
		return err
	}
	if err := c.Sandbox.AllowRegistries(c.Registries()); err != nil {
		return err
	}
	c.Sandbox.AllowEndpoints(c.Endpoints)
	return nil
}
