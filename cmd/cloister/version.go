// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"

	"github.com/cloister-build/cloister/cmd/cloister/internal/buildinfo"
	"github.com/spf13/cobra"
)

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print version, revision, Go version and platform",
		Example: "  cloister version",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), versionLine())
			return err
		},
	}
}

// versionLine is what cloister version and cloister --version print.
func versionLine() string {
	return fmt.Sprintf("cloister %s  revision %s  %s  %s/%s",
		buildinfo.Version, buildinfo.Revision(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
