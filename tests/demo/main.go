// SPDX-License-Identifier: Apache-2.0

// Command demo shows on this machine what Cloister is for: it builds and tests the example remotely,
// builds it again from the cache, and lets an action try what it must not do. It is no test; it fails
// if what it wants to show is not so. Run it by make demo, from the root of the repository. With -repro, as by make repro, it
// judges whether each action of the example is reproducible.
//
// Everything it starts ends with it, also on Ctrl-C, and everything it writes is in one directory, which
// it removes.
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
