// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox/policy/strict"
)

// Images are an operator's rules for the container images that actions name. The zero Images permits no registry.
type Images struct {
	// Registries are the registries that images may come from: HOST[:PORT], or HOST[:PORT]/PATH for the repositories at
	// and below PATH.
	Registries []string
	// MaxBytes limits the layers of an image together, packed and unpacked, and MaxPull the time to pull it. 0 means the
	// default of package image.
	MaxBytes int64
	MaxPull  time.Duration
	// CacheUnpinned caches results although the action's digest does not determine the image: the action names a tag,
	// or the default properties name the image.
	CacheUnpinned bool
	// NoEnvironment omits the environment of images. By default, actions get it, and their own variables override it.
	NoEnvironment bool
}

// Images returns the rules for container images.
func (p *Policy) Images() Images {
	if p == nil {
		return Images{}
	}
	return p.images
}

// registry matches an entry of registries.
var registry = regexp.MustCompile(`^[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._/-]+)?$`)

// imageQuantities are the amounts of the section. Actions cannot request them.
var (
	maxImage = quantity{key: "max_size", kind: sizes, min: 1 << 20}
	maxPull  = quantity{key: "max_pull_time", kind: durations, min: int64(time.Second)}
)

func (r *reader) readImages(n *strict.Node) error {
	to := &r.policy.images
	return r.Mapping(n, strict.Keys{
		"registries": func(n *strict.Node) error {
			return r.Sequence(n, func(n *strict.Node) error {
				s, err := r.Scalar(n)
				if err == nil && !registry.MatchString(s) {
					err = r.Errorf(n, "invalid registry %q: write HOST, HOST:PORT or HOST/PATH", s)
				}
				to.Registries = append(to.Registries, s)
				return err
			})
		},
		"max_size":       plainValue(r.Decoder, &to.MaxBytes, maxImage.read),
		"max_pull_time":  plainValue(r.Decoder, (*int64)(&to.MaxPull), maxPull.read),
		"cache_unpinned": plainValue(r.Decoder, &to.CacheUnpinned, parseBool),
		"environment": plainValue(r.Decoder, &to.NoEnvironment, func(s string) (bool, error) {
			v, err := parseBool(s)
			return !v, err
		}),
	})
}

// plainValue is value for a setting whose position no message reports.
func plainValue[T any](d *strict.Decoder, to *T, parse func(string) (T, error)) func(*strict.Node) error {
	return func(n *strict.Node) error {
		var s setting[T]
		err := value(d, &s, parse)(n)
		*to = s.v
		return err
	}
}

// images writes the section, without the values that are the defaults.
func (w *textWriter) images(i Images) {
	var lines []string
	if len(i.Registries) > 0 {
		lines = append(lines, fmt.Sprintf("registries: [%s]", strings.Join(quoted(i.Registries), ", ")))
	}
	if i.MaxBytes > 0 {
		lines = append(lines, "max_size: "+maxImage.format(i.MaxBytes))
	}
	if i.MaxPull > 0 {
		lines = append(lines, "max_pull_time: "+maxPull.format(int64(i.MaxPull)))
	}
	if i.CacheUnpinned {
		lines = append(lines, "cache_unpinned: true")
	}
	if i.NoEnvironment {
		lines = append(lines, "environment: false")
	}
	if len(lines) > 0 {
		w.line(0, "images:")
	}
	for _, l := range lines {
		w.line(1, "%s", l)
	}
}
