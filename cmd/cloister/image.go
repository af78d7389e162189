// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/storedir"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func imageCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "image",
		Short: "Show and manage container images",
		Long: `If the property container-image of an action names an image, the action runs with that image as its root file system. A
server pulls the image when an action needs it, if the operator allows the registry. These commands pull or load images
in advance, show them and remove them. Each instance has its own images.

They call the server that has the store of --dir open, and exit with code 5 if none runs. With --server and without --dir
they call that server, which must run with --auth and grant the caller the right operate.`,
		Example: `  cloister image pull registry.example.com/tools:v3
  cloister image load tools.tar --as tools:v3
  cloister image ls
  cloister image show tools:v3                 # and the line that selects it in a BUILD file
  cloister image rm 9f2c1e77`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(imagePullCommand(), imageLoadCommand(), imageLsCommand(), imageShowCommand(), imageRmCommand())
	return cmd
}

// imageConfig is the flags that select the server whose images a command manages, and an instance there.
type imageConfig struct {
	from   client.Server
	dir    string // of the store
	json   bool
	remote bool // the images are those of the server
}

// register adds the flags to a command that prints a value like printed with --json.
func (c *imageConfig) register(cmd *cobra.Command, printed any) {
	c.from.Register(cmd)
	f := cmd.Flags()
	f.StringVar(&c.dir, "dir", "",
		"directory of a local store (default, unless a server is named: cloister in the user's cache directory)")
	render.JSONFlag(f, &c.json, "print JSON", printed)
	cmd.PreRun = func(cmd *cobra.Command, _ []string) { c.remote = c.dir == "" && c.from.Named(cmd) }
}

// call calls f with the service of the server and the name of the instance, until a signal arrives.
func (c *imageConfig) call(ctx context.Context, f func(context.Context, cloisterpb.ImagesClient, string) error) error {
	ctx, end := interrupt.Context(ctx)
	defer end()
	instance, err := instanceOf(&c.from)
	if err != nil {
		return err
	}
	conn, err := c.dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	return c.explain(ctx, f(ctx, cloisterpb.NewImagesClient(conn), instance))
}

func (c *imageConfig) dial(ctx context.Context) (*grpc.ClientConn, error) {
	if c.remote {
		conn, _, err := c.from.Dial()
		return conn, err
	}
	var err error
	if c.dir, err = storedir.Path(c.dir); err != nil {
		return nil, err
	}
	conn, err := diskctl.Dial(ctx, c.dir)
	switch {
	case errors.Is(err, diskctl.ErrNoStore), errors.Is(err, diskctl.ErrNoServer):
		return nil, exit.New(exit.Unreachable, fmt.Errorf(
			"no server has %s open: start cloister serve --dir %[1]s, or pass its --dir or --server", render.Quote(c.dir)))
	case err != nil:
		return nil, interrupt.Explain(ctx, err, "stopped")
	}
	return conn, nil
}

// explain returns the reason of a failed call, with its exit code. Other errors are unchanged.
func (c *imageConfig) explain(ctx context.Context, err error) error {
	s, call := status.FromError(err)
	switch {
	case err == nil || !call:
		return err
	case ctx.Err() != nil:
		return interrupt.Explain(ctx, err, "stopped")
	case c.remote:
		return c.from.ExplainCall(err)
	}
	code, reason := exit.No, remote.Reason(s)
	switch s.Code() {
	case codes.NotFound:
		code = exit.Absent
	case codes.Unavailable:
		code = exit.Unreachable
	case codes.Unimplemented:
		reason = "it runs no actions in container images"
	}
	return exit.New(code, fmt.Errorf("the server that has %s open: %s", render.Quote(c.dir), reason))
}

// imageName returns the name of an image that may be the value of a property.
func imageName(arg string) string {
	return strings.TrimPrefix(strings.TrimPrefix(arg, "docker://"), "oci:")
}

// list returns the images that a name identifies, or all, of the instance or, if the command line names none, of all.
func (c *imageConfig) list(
	ctx context.Context, images cloisterpb.ImagesClient, instance, name string,
) (*cloisterpb.ListImagesResponse, error) {
	return images.List(ctx, &cloisterpb.ListImagesRequest{
		InstanceName: instance, AllInstances: c.from.AllInstances(), Name: imageName(name),
	})
}

// find returns the images that a name identifies. If there are several, they are names of one image.
func (c *imageConfig) find(
	ctx context.Context, images cloisterpb.ImagesClient, instance, name string,
) ([]*cloisterpb.ContainerImage, error) {
	m, err := c.list(ctx, images, instance, name)
	if err != nil {
		return nil, err
	}
	if len(m.Images) == 0 {
		where := "in any instance"
		if !c.from.AllInstances() {
			where = fmt.Sprintf("in instance %q", instance)
		}
		return nil, exit.New(exit.Absent, fmt.Errorf("no image %s %s; see cloister image ls", render.Quote(name), where))
	}
	first := m.Images[0]
	for _, other := range m.Images[1:] {
		switch {
		case other.InstanceName != first.InstanceName:
			return nil, exit.New(exit.Usage, fmt.Errorf("image %s is in instances %q and %q: select one with --instance",
				render.Quote(name), first.InstanceName, other.InstanceName))
		case other.Digest != first.Digest:
			return nil, exit.New(exit.Usage, fmt.Errorf("image %s is ambiguous: %s (%s) or %s (%s); write more of it",
				render.Quote(name), printable.Text(first.Digest), printable.Text(first.Reference),
				printable.Text(other.Digest), printable.Text(other.Reference)))
		}
	}
	return m.Images, nil
}

// complete completes the names of images for a shell. It offers nothing if the server does not answer within two
// seconds.
func (c *imageConfig) complete(
	cmd *cobra.Command, _ []string, typed string,
) ([]cobra.Completion, cobra.ShellCompDirective) {
	cmd.PreRun(cmd, nil)
	ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Second)
	defer cancel()
	var names []cobra.Completion
	err := c.call(ctx, func(ctx context.Context, images cloisterpb.ImagesClient, instance string) error {
		m, err := c.list(ctx, images, instance, "")
		for _, e := range m.GetImages() {
			if name := printable.Text(e.Reference); strings.HasPrefix(name, typed) {
				names = append(names, cobra.CompletionWithDesc(name, sandbox.Bytes(e.Bytes)))
			}
		}
		return err
	})
	if err != nil {
		cobra.CompDebugln(err.Error(), false)
	}
	return names, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
}

// An imageRow is an image in JSON.
type imageRow struct {
	Instance  string    `json:"instance"`
	Reference string    `json:"reference"`
	Pinned    string    `json:"pinned"`
	Digest    string    `json:"digest"`
	Root      string    `json:"root"`
	Env       []string  `json:"env"`
	Entries   int64     `json:"entries"`
	Files     int64     `json:"files"`
	Bytes     int64     `json:"bytes"`
	Dropped   int64     `json:"dropped"`
	Pulled    time.Time `json:"pulled"`
	Loaded    bool      `json:"loaded"`
	Property  string    `json:"property"` // the value of container-image that selects it
}

func imageRowOf(m *cloisterpb.ContainerImage) imageRow {
	return imageRow{
		m.GetInstanceName(), m.GetReference(), m.GetPinned(), m.GetDigest(), m.GetRoot(), append([]string{}, m.GetEnv()...),
		m.GetEntries(), m.GetFiles(), m.GetBytes(), m.GetDropped(), m.GetPulled().AsTime(), m.GetLoaded(), imageProperty(m),
	}
}

// imageProperty returns the value of the property container-image that selects an image, whatever its tag means later.
func imageProperty(m *cloisterpb.ContainerImage) string {
	pinned := printable.Text(m.GetPinned())
	if m.GetLoaded() {
		return "oci:" + strings.TrimPrefix(pinned, "index.docker.io/library/") // which stands for no registry
	}
	return "docker://" + pinned
}
