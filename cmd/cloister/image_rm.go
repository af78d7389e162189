// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/spf13/cobra"
)

func imageRmCommand() *cobra.Command {
	var c imageConfig
	cmd := &cobra.Command{
		Use:   "rm IMAGE... [--dir DIR | --server URL] [--instance NAME] [--json]",
		Short: "Remove container images from a server",
		Long: `Rm removes images from the list of a server: one name of an image by its reference, and all of its names by a digest or
at least 8 digits of one. Actions that name a removed image pull it again. Blobs stay in the store until it evicts them,
and running actions keep what they use.

The exit code is 4 if the server does not have one of the images; then rm removes none.`,
		Example: `  cloister image rm registry.example.com/tools:v2
  cloister image rm 9f2c1e77 --instance main`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.call(cmd.Context(), func(ctx context.Context, images cloisterpb.ImagesClient, instance string) error {
				return c.remove(ctx, images, instance, args, cmd.OutOrStdout())
			})
		},
	}
	c.register(cmd, []imageRow{})
	cmd.ValidArgsFunction = c.complete
	return cmd
}

// remove removes images and prints their names.
func (c *imageConfig) remove(
	ctx context.Context, images cloisterpb.ImagesClient, instance string, names []string, out io.Writer,
) error {
	type key struct{ instance, reference string }
	seen := map[key]bool{}
	var all []*cloisterpb.ContainerImage
	for _, name := range names {
		found, err := c.find(ctx, images, instance, name)
		if err != nil {
			return err
		}
		for _, m := range found {
			if k := (key{m.InstanceName, m.Reference}); !seen[k] {
				seen[k] = true
				all = append(all, m)
			}
		}
	}
	for _, m := range all {
		req := &cloisterpb.RemoveImageRequest{InstanceName: m.InstanceName, Reference: m.Reference}
		if _, err := images.Remove(ctx, req); err != nil {
			return err
		}
		if c.json {
			continue
		}
		if _, err := fmt.Fprintln(out, "removed ", printable.Text(m.Reference)); err != nil {
			return err
		}
	}
	if c.json {
		return render.JSON(out, imageListOf(&cloisterpb.ListImagesResponse{Images: all}).Images)
	}
	return nil
}
