// SPDX-License-Identifier: Apache-2.0

// Command demo shows on this machine what Cloister does: it builds and tests the example remotely, builds it again from
// the cache, and runs an action that attempts forbidden things. It fails if any of these behaves differently from what
// it claims. Run it with make demo from the root of the repository. With -repro, as in make repro, it checks whether
// every action of the example is reproducible.
//
// It stops every process that it starts, also on Ctrl-C, and removes its only directory.
package main

import (
	"fmt"
	"os"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}
