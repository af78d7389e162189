// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/spf13/cobra"
)

func imageShowCommand() *cobra.Command {
	var c imageConfig
	cmd := &cobra.Command{
		Use:   "show IMAGE [--dir DIR | --server URL] [--instance NAME] [--json]",
		Short: "Show a container image",
		Long: `Show prints an image of a server, once for each of its names, and the line that selects it in a BUILD file.
IMAGE is a reference, a digest, or at least 8 digits of one. To see its files, pass the root to cloister cas ls.

The exit code is 4 if the server does not have it.`,
		Example: `  cloister image show registry.example.com/tools:v3
  cloister image show 9f2c1e77 --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.call(cmd.Context(), func(ctx context.Context, images cloisterpb.ImagesClient, instance string) error {
				found, err := c.find(ctx, images, instance, args[0])
				if err != nil {
					return err
				}
				if c.json {
					return render.JSON(cmd.OutOrStdout(), imageListOf(&cloisterpb.ListImagesResponse{Images: found}).Images)
				}
				return showImages(cmd.OutOrStdout(), found, time.Now())
			})
		},
	}
	c.register(cmd, []imageRow{})
	cmd.ValidArgsFunction = c.complete
	return cmd
}

// showImages prints images for a person.
func showImages(out io.Writer, found []*cloisterpb.ContainerImage, now time.Time) error {
	for i, m := range found {
		if i > 0 {
			if _, err := fmt.Fprintln(out); err != nil {
				return err
			}
		}
		p := &render.Page{W: out}
		p.Line("image", printable.Text(m.Reference))
		p.Line("pinned", printable.Text(m.Pinned))
		p.Line("digest", printable.Text(m.Digest))
		p.Line("instance", render.Quote(m.InstanceName))
		p.Line("root", printable.Text(m.Root))
		p.Line("size", imageSize(m))
		for _, e := range m.Env {
			p.Line("environment", render.Quote(e))
		}
		how := "pulled"
		if m.Loaded {
			how = "loaded"
		}
		at := m.Pulled.AsTime()
		p.Line(how, fmt.Sprintf("%s, %s ago", at.Local().Format(time.DateTime), render.Age(now.Sub(at).Seconds())))
		p.Line("use", fmt.Sprintf(`exec_properties = {"container-image": "%s"}`, imageProperty(m)))
		if p.Err != nil {
			return p.Err
		}
	}
	return nil
}
