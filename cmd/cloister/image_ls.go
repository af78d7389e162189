// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/spf13/cobra"
)

func imageLsCommand() *cobra.Command {
	var c imageConfig
	cmd := &cobra.Command{
		Use:   "ls [--dir DIR | --server URL] [--instance NAME] [--json]",
		Short: "List container images and current pulls",
		Long: `Ls prints the images of a server with the first digits of their digests, the sizes of their files and their ages, and
then the running and queued pulls. Without --instance it covers all instances.

Blobs of an image that no action uses are evicted like others. It remains in the list, and is pulled again when needed;
a loaded one must be loaded again.`,
		Example: `  cloister image ls
  cloister image ls --server grpcs://build.example.com:8980 --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.call(cmd.Context(), func(ctx context.Context, images cloisterpb.ImagesClient, instance string) error {
				m, err := c.list(ctx, images, instance, "")
				if err != nil {
					return err
				}
				if c.json {
					return render.JSON(cmd.OutOrStdout(), imageListOf(m))
				}
				if len(m.Images)+len(m.Pulls) == 0 {
					fmt.Fprintln(unlessQuiet(cmd, cmd.ErrOrStderr()), "the server has no images")
					return nil
				}
				return printImages(cmd.OutOrStdout(), m, time.Now())
			})
		},
	}
	c.register(cmd, imageList{})
	return cmd
}

// An imageList is what ls prints.
type imageList struct {
	Images []imageRow `json:"images"`
	Pulls  []pullRow  `json:"pulls"`
}

// A pullRow is a pull in JSON.
type pullRow struct {
	Instance string    `json:"instance"`
	Pinned   string    `json:"pinned"`
	Started  time.Time `json:"started"`
	Read     int64     `json:"read_bytes"`
	Total    int64     `json:"total_bytes"` // 0: not known yet
	Waiting  int64     `json:"waiting"`
}

func imageListOf(m *cloisterpb.ListImagesResponse) imageList {
	l := imageList{Images: []imageRow{}, Pulls: []pullRow{}}
	for _, e := range m.Images {
		l.Images = append(l.Images, imageRowOf(e))
	}
	for _, p := range m.Pulls {
		l.Pulls = append(l.Pulls, pullRow{p.InstanceName, p.Pinned, p.Started.AsTime(), p.ReadBytes, p.TotalBytes, p.Waiting})
	}
	return l
}

// printImages prints tables for a person.
func printImages(out io.Writer, m *cloisterpb.ListImagesResponse, now time.Time) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if len(m.Images) > 0 {
		fmt.Fprintln(w, "image\tdigest\tsize\tage\tinstance")
	}
	for _, e := range m.Images {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", printable.Text(e.Reference), shortImage(e.Digest), sandbox.Bytes(e.Bytes),
			render.Age(now.Sub(e.Pulled.AsTime()).Seconds()), render.Quote(e.InstanceName))
	}
	if len(m.Pulls) > 0 {
		fmt.Fprintln(w, "pull\tdigest\tread\tage\tinstance")
	}
	for _, p := range m.Pulls {
		name, digest, _ := strings.Cut(p.Pinned, "@")
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", printable.Text(name), shortImage(digest), pullProgress(p),
			render.Age(now.Sub(p.Started.AsTime()).Seconds()), render.Quote(p.InstanceName))
	}
	return w.Flush()
}

// shortImage returns the first digits of an image's digest.
func shortImage(digest string) string {
	digits := printable.Text(strings.TrimPrefix(digest, "sha256:"))
	return digits[:min(12, len(digits))]
}

// pullProgress returns how much of an image was read.
func pullProgress(p *cloisterpb.ImagePull) string {
	if p.TotalBytes <= 0 {
		return "queued"
	}
	return sandbox.Bytes(p.ReadBytes) + " of " + sandbox.Bytes(p.TotalBytes)
}
