// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"

	"github.com/cloister-build/cloister/cmd/cloister/internal/buildinfo"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/spf13/cobra"
)

func versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print version, revision, Go version and platform",
		Example: "  cloister version",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON {
				return render.JSON(cmd.OutOrStdout(), newVersion())
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), versionLine())
			return err
		},
	}
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON object", version{})
	return cmd
}

// A version is what cloister version prints.
type version struct {
	Version  string `json:"version"`
	Revision string `json:"revision"`
	Go       string `json:"go"`
	Platform string `json:"platform"` // OS/ARCHITECTURE
}

func newVersion() version {
	return version{buildinfo.Version, buildinfo.Revision(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
}

// versionLine is what cloister version and cloister --version print.
func versionLine() string {
	v := newVersion()
	return fmt.Sprintf("cloister %s  revision %s  %s  %s", v.Version, v.Revision, v.Go, v.Platform)
}
