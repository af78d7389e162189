// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is the release; the revision comes from the build.
const version = "0.1.0"

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Prints version, revision, Go version and platform",
		Example: "  cloister version",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "cloister %s  revision %s  %s  %s/%s\n",
				version, builtFrom(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}

// builtFrom returns what the Go toolchain recorded of the checkout, or "unknown".
func builtFrom() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	rev, dirty := "unknown", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			rev = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = " (modified)"
		}
	}
	return rev + dirty
}
