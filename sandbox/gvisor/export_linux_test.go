// SPDX-License-Identifier: Apache-2.0

package gvisor

import (
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// ExplainProbe is explain, for tests.
var ExplainProbe = explain

// SetTimes sets how long a run of b may take to report its start and, after its command has exited, its end.
func SetTimes(b sandbox.Backend, start, reap time.Duration) {
	b.(*backend).times = times{start: start, reap: reap}
}
