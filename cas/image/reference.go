// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/google/go-containerregistry/pkg/name"
)

// A Reference is the name of an image in a registry, with a tag or a digest.
type Reference struct{ ref name.Reference }

// maxReference bounds the length of a reference in bytes.
const maxReference = 1000

// ParseReference parses a reference as Docker does: without a registry it is Docker Hub's, without a tag it has the tag
// latest. A malformed one is cas.ErrInvalid.
func ParseReference(s string) (Reference, error) {
	if len(s) > maxReference {
		return Reference{}, fmt.Errorf("image reference %+.64q...: %w: it is longer than %d bytes", s, cas.ErrInvalid,
			maxReference)
	}
	ref, err := name.ParseReference(s)
	if err == nil {
		for part := range strings.SplitSeq(ref.Context().Name(), "/") {
			if strings.Trim(part, ".") == "" { // a registry could resolve "..", and In would be wrong
				err = cas.ErrInvalid
			}
		}
	}
	if err != nil {
		return Reference{}, fmt.Errorf("image reference %+.256q: %w: write [REGISTRY/]REPOSITORY:TAG or @sha256:HASH", s,
			cas.ErrInvalid)
	}
	return Reference{ref}, nil
}

// String returns the full name, with registry and tag or digest.
func (r Reference) String() string {
	if r.ref == nil {
		return ""
	}
	return r.ref.Name()
}

// Registry returns the host of the registry, and its port if it is not the default one.
func (r Reference) Registry() string { return host(r.ref.Context().RegistryStr()) }

// host returns the name of a registry as people write it: Docker Hub's has several.
func host(registry string) string {
	if registry == name.DefaultRegistry {
		return "docker.io"
	}
	return registry
}

// Digest returns the digest in the reference, or "" if it has a tag.
func (r Reference) Digest() string {
	if d, ok := r.ref.(name.Digest); ok {
		return d.DigestStr()
	}
	return ""
}

// Pin returns the reference with a digest in place of its tag.
func (r Reference) Pin(digest string) string { return r.ref.Context().Digest(digest).String() }

// IsPlace reports whether s can be one of the places of Reference.In.
func IsPlace(s string) bool {
	host, path, below := strings.Cut(s, "/")
	if _, err := name.NewRegistry(host, name.StrictValidation); err != nil || !below {
		return err == nil
	}
	_, err := name.NewRepository(s)
	return err == nil && path == strings.Trim(path, "/")
}

// In reports whether the image is in one of the places: HOST[:PORT], or HOST[:PORT]/PATH for the repositories at and
// below PATH.
func (r Reference) In(places []string) bool {
	repository := r.Registry() + "/" + r.ref.Context().RepositoryStr()
	for _, p := range places {
		h, path, _ := strings.Cut(strings.TrimSuffix(p, "/"), "/")
		if p := strings.TrimSuffix(host(h)+"/"+path, "/"); repository == p || strings.HasPrefix(repository, p+"/") {
			return true
		}
	}
	return false
}
