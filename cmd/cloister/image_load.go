// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func imageLoadCommand() *cobra.Command {
	var c imageConfig
	var as, selector string
	cmd := &cobra.Command{
		Use:   "load FILE|DIR [--as NAME] [--select NAME] [--dir DIR] [--instance NAME] [--json]",
		Short: "Write a container image from a file to the store",
		Long: `Load stores the image in FILE, the output of docker save, or in DIR, an OCI layout, and prints the value of the property
container-image that selects exactly this image. It contacts no registry. The server itself reads the file, so it must
run on this machine and have access.

The exit code is 1 if the image cannot be loaded, and 4 if the file does not contain the image of --select.`,
		Example: `  cloister image load tools.tar                # under its own name
  cloister image load ./layout --as tools:v3
  cloister image load all.tar --select example.com/b:2 --dir /var/cache/cloister`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := filepath.Abs(args[0])
			if err != nil {
				return exit.New(exit.Environment, err)
			}
			if as != "" {
				if _, err := image.ParseReference(as); err != nil {
					return fmt.Errorf("--as: %w", err)
				}
			}
			if _, err := os.Stat(path); !c.remote && errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("%s: %w", args[0], errors.Unwrap(err))
			}
			return c.call(cmd.Context(), func(ctx context.Context, images cloisterpb.ImagesClient, instance string) error {
				m, err := images.Load(ctx, &cloisterpb.LoadImageRequest{
					InstanceName: instance, Path: path, Selector: selector, Reference: as,
				})
				if status.Code(err) == codes.InvalidArgument && as == "" {
					err = status.Error(codes.InvalidArgument, status.Convert(err).Message()+": name it with --as")
				}
				if err != nil {
					return err
				}
				return printPulled(&c, m.Image, cmd.OutOrStdout(), unlessQuiet(cmd, cmd.ErrOrStderr()))
			})
		},
	}
	c.register(cmd, imageRow{})
	f := cmd.Flags()
	f.StringVar(&as, "as", "", "name under which actions use the image (default: its own)")
	f.StringVar(&selector, "select", "", "tag, name or digest of one of several images in the file")
	return cmd
}
