// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb" // registers the format
	_ "github.com/goreleaser/nfpm/v2/rpm" // registers the format
)

// pack builds a package from nfpm.yaml.
func (b *build) pack(format, arch, program string) error {
	values := map[string]string{"ARCH": arch, "VERSION": b.version, "PROGRAM": program, "COMPLETIONS": b.completions()}
	config, err := nfpm.ParseFileWithEnvMapping("nfpm.yaml", func(name string) string { return values[name] })
	if err != nil {
		return err
	}
	info, err := config.Get(format)
	if err != nil {
		return err
	}
	info.MTime = b.time
	info = nfpm.WithDefaults(info)
	if err := nfpm.PrepareForPackager(info, format); err != nil {
		return err
	}
	packager, err := nfpm.Get(format)
	if err != nil {
		return err
	}
	f, done, err := b.create(packager.ConventionalFileName(info))
	if err != nil {
		return err
	}
	return done(packager.Package(info, f))
}
