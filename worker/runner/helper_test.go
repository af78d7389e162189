// SPDX-License-Identifier: Apache-2.0

package runner

// Tests of this package use a sandbox.
import _ "github.com/cloister-build/cloister/sandbox/namespace/earlyinit"
