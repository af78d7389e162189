// SPDX-License-Identifier: Apache-2.0

package main

import (
	"compress/gzip"
	"errors"
	"fmt"

	"helm.sh/helm/v3/pkg/chart/loader"
)

// chart writes the chart in dir like helm package, except for the packing time. Its version must equal the program's,
// whose image it uses.
func (b *build) chart(dir string) error {
	c, err := loader.Load(dir)
	if err != nil {
		return err
	}
	if err := c.Validate(); err != nil {
		return err
	}
	if c.Metadata.Version != b.version || c.Metadata.AppVersion != b.version {
		return fmt.Errorf("Chart.yaml has version %s and appVersion %s: write %s, which is the program's", c.Metadata.Version, c.Metadata.AppVersion, b.version)
	}
	f, done, err := b.create("cloister-chart-" + b.version + ".tgz")
	if err != nil {
		return err
	}
	z := gzip.NewWriter(f)
	return done(errors.Join(b.archive(z, dir, c.Name()+"/"), z.Close()))
}
