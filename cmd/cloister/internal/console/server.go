// SPDX-License-Identifier: Apache-2.0

package console

import (
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localstore"
)

func listWorkers(r *request) (any, error) { return r.state() }

// cacheData is the data of /cache.
type cacheData struct {
	*localstore.Usage
	Rows []bucket `json:"-"` // of bytes by age
}

func showCache(r *request) (any, error) {
	s, report, err := r.measure()
	if err != nil {
		return nil, err
	}
	d := &cacheData{Usage: localstore.NewUsage(&s, &report)}
	for _, a := range report.Ages {
		label := "last used: " + a.Label
		if a.Leased {
			label = "leased: too recent to remove"
		}
		d.Rows = append(d.Rows, bucket{Label: label, Count: a.Bytes})
	}
	d.Rows = widths(d.Rows)
	return d, nil
}

// measure returns the usage of the store, which only operators may see.
func (r *request) measure() (s disk.Stats, report disk.CollectReport, err error) {
	err = r.withStore(func(c *diskctl.Client) error {
		s, report, err = localstore.Measure(r.Context(), c)
		return err
	})
	return s, report, err
}

// stats returns the statistics of the store, without the report of what could be removed.
func (r *request) stats() (s disk.Stats, err error) {
	err = r.withStore(func(c *diskctl.Client) error {
		s, err = c.Stats(r.Context())
		return err
	})
	return s, err
}

func (r *request) withStore(do func(*diskctl.Client) error) error {
	if err := r.operator(); err != nil {
		return err
	}
	conn, _, err := r.from.Dial()
	if err != nil {
		return err
	}
	store := diskctl.Connect(conn, r.from.ExplainCall)
	defer store.Close()
	return do(store)
}

// showCheck shows how this machine confines actions to everyone who may see the server.
func showCheck(r *request) (any, error) {
	if _, err := r.state(); err != nil {
		return nil, err
	}
	return r.h.cfg.Confinement(r.Request), nil
}
