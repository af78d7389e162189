// SPDX-License-Identifier: Apache-2.0

package earlyinit

import (
	"github.com/cloister-build/cloister/sandbox/internal/agent"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
)

// Go initialises packages in the order of their paths as dependencies allow, so this runs before google.golang.org.
func init() {
	zygote.Main()
	agent.Main()
}
