// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"

	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/spf13/cobra"
)

func imagePullCommand() *cobra.Command {
	var c imageConfig
	cmd := &cobra.Command{
		Use:   "pull REF [--dir DIR | --server URL] [--instance NAME] [--json]",
		Short: "Download a container image from its registry",
		Long: `Pull stores the files of an image in the store of a server, and prints the value of the property container-image that
selects exactly this image. It downloads nothing if the server already has the image. REF is [REGISTRY/]REPOSITORY with a
:TAG or a digest, in Docker's syntax; the default registry is Docker Hub, the default tag latest.

The server contacts only registries that its operator allows (serve: --images), with the credentials of its own Docker
configuration. Ctrl-C ends the pull, unless an action or another command waits for it.

The exit code is 1 if the image cannot be pulled.`,
		Example: `  cloister image pull registry.example.com/tools:v3
  cloister image pull debian:12 --instance main
  cloister image pull registry.example.com/tools:v3 --server grpcs://build.example.com:8980`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ref, err := image.ParseReference(imageName(args[0]))
			if err != nil {
				return err
			}
			return imagePull(cmd.Context(), &c, ref.String(), cmd.OutOrStdout(), unlessQuiet(cmd, cmd.ErrOrStderr()))
		},
	}
	c.register(cmd, imageRow{})
	return cmd
}

// imagePull prints the image to out, and its progress to info if that is a terminal.
func imagePull(ctx context.Context, c *imageConfig, ref string, out, info io.Writer) error {
	return c.call(ctx, func(ctx context.Context, images cloisterpb.ImagesClient, instance string) error {
		stream, err := images.Pull(ctx, &cloisterpb.PullImageRequest{InstanceName: instance, Reference: ref})
		if err != nil {
			return err
		}
		progress := terminal.NewProgress(info, "pull     ")
		for {
			m, err := stream.Recv()
			if err != nil || m.Image != nil {
				progress.Clear()
			}
			switch {
			case err != nil:
				return err
			case m.Image != nil:
				return printPulled(c, m.Image, out, info)
			case m.Progress.GetTotalBytes() > 0:
				progress.Show(m.Progress.ReadBytes, m.Progress.TotalBytes, "")
			case m.Progress != nil:
				progress.Say("queued")
			}
		}
	})
}

// printPulled prints an image that was pulled or loaded.
func printPulled(c *imageConfig, m *cloisterpb.ContainerImage, out, info io.Writer) error {
	if c.json {
		return render.JSON(out, imageRowOf(m))
	}
	fmt.Fprintf(info, "%s\n", imageSize(m))
	_, err := fmt.Fprintln(out, imageProperty(m))
	return err
}

// imageSize describes what an image contains.
func imageSize(m *cloisterpb.ContainerImage) string {
	text := fmt.Sprintf("%s in %s", sandbox.Bytes(m.GetBytes()), render.Count(m.GetFiles(), "file"))
	if m.GetDropped() > 0 {
		text += fmt.Sprintf("; its devices, sockets and pipes (%d) were dropped", m.GetDropped())
	}
	return text
}
