// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync"

	"github.com/cloister-build/cloister/tests/internal/containers"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

func (s *story) registry(args []string) error {
	switch strings.Join(args, " ") {
	case "":
		s.script.Setenv("REGISTRY", containers.HeldRegistry(s, &s.blobs))
	case "private":
		s.script.Setenv("REGISTRY", containers.PrivateRegistry(s))
		s.pushing = []remote.Option{remote.WithAuth(&containers.Builder)}
	case "hold":
		s.blobs.Lock()
		s.sendBlobs = sync.OnceFunc(s.blobs.Unlock)
		s.Cleanup(s.sendBlobs)
	case "send":
		s.sendBlobs()
	default:
		return fmt.Errorf("registry %q: write private, hold or send", args)
	}
	return nil
}

func (s *story) image(args []string) error {
	tag, mark := args[0], args[1]
	im := containers.Image(s, mark, "sh", "cat", "ls")
	name := strings.ReplaceAll(tag, ":", "_")
	s.script.Setenv(name, containers.Push(s, s.script.Getenv("REGISTRY")+"/"+tag, im, s.pushing...))
	at, err := layout.Write(filepath.Join(s.work, name), empty.Index)
	if err != nil {
		return err
	}
	return at.AppendImage(im)
}
