// SPDX-License-Identifier: Apache-2.0

package images

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
)

// Property is the platform property that names a container image.
const Property = "container-image"

// A Source is the origin of an image on a command line: a registry or a file.
type Source struct {
	Reference image.Reference // in a registry, or the name that the image of the file gets
	File      string          // an OCI layout or the output of docker save; "" for a registry
}

// ParseSource parses the value of a flag. A path that exists, and anything that begins like one, is a file.
func ParseSource(s string) (Source, error) {
	if _, err := os.Stat(s); err == nil || filepath.IsAbs(s) || strings.HasPrefix(s, ".") {
		if err != nil {
			return Source{}, err
		}
		ref, err := image.ParseReference("file")
		return Source{ref, s}, err
	}
	ref, err := image.ParseReference(strings.TrimPrefix(s, docker))
	return Source{Reference: ref}, err
}

// Value returns the value of Property for the image.
func (s Source) Value() string {
	if s.File != "" {
		return loaded + s.Reference.String()
	}
	return docker + s.Reference.String()
}

// progressInterval is the interval of updates on a terminal.
const progressInterval = 200 * time.Millisecond

// Fetch pulls or loads the image of s and returns its pinned reference. It shows the progress in notes.
func (p *Provider) Fetch(ctx context.Context, instance string, s Source, notes io.Writer) (string, error) {
	if s.File != "" {
		e, err := p.Load(ctx, instance, s.File, "", s.Reference.String())
		if err != nil {
			return "", err
		}
		return e.Pinned, nil
	}
	fmt.Fprintf(notes, "pulling %s\n", s.Reference)
	pinned, err := p.Pin(ctx, instance, s.Value())
	if err != nil {
		return "", err
	}
	if line := terminal.NewProgress(notes, ""); line != nil {
		done := make(chan struct{})
		shown := make(chan struct{})
		go func() { defer close(shown); p.show(line, done) }()
		defer func() { close(done); <-shown }()
	}
	_, _, err = p.Root(ctx, instance, pinned, cas.Digest{})
	return pinned, err
}

// show prints the progress of the current pull until done is closed.
func (p *Provider) show(line *terminal.Progress, done <-chan struct{}) {
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case <-done:
			line.Clear()
			return
		case <-tick.C:
			for _, pull := range p.Pulling() {
				line.Show(pull.Read, pull.Total, "")
			}
		}
	}
}
