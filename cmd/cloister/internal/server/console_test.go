// SPDX-License-Identifier: Apache-2.0

package server

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
)

func TestReportIsRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reads := 0
		report := recent(time.Minute, func() int { reads++; return reads })
		for _, step := range []struct {
			wait time.Duration
			want int
		}{{0, 1}, {59 * time.Second, 1}, {time.Second, 2}, {59 * time.Second, 2}, {time.Hour, 3}} {
			time.Sleep(step.wait)
			expect.Equal(t, report(), step.want, "after %v", step.wait)
		}
	})
}
