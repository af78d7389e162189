// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"fmt"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/spf13/cobra"
)

// Config is the flags of a new sandbox.
type Config struct {
	localworker.ActionFlags
	Sandbox     confinement.Flags
	Name        string // "" for a random one
	IdleTimeout time.Duration
	Lifetime    time.Duration
}

// Register adds the flags.
func (c *Config) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	c.RegisterInputs(cmd)
	c.RegisterRoot(cmd)
	c.RegisterImage(cmd)
	c.RegisterLimits(cmd)
	c.Sandbox.Register(cmd)
	c.Sandbox.RegisterImages(cmd)
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
