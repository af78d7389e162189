// SPDX-License-Identifier: Apache-2.0

package gvisor_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/gvisor"
)

// Probe says why gVisor cannot be used: without runsc, for example, or as an ordinary user.
func ExampleNew() {
	b := gvisor.New()
	defer b.Close()
	features, err := b.Probe(context.Background())
	if errors.Is(err, sandbox.ErrUnsupported) {
		fmt.Println(err)
		return
	}
	fmt.Println(features.Kernel, features.Limits)
}
