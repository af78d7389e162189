// SPDX-License-Identifier: Apache-2.0

// Package earlyinit replaces a call of namespace.Init. A program imports it for its side effect:
//
//	import _ "github.com/cloister-build/cloister/sandbox/namespace/earlyinit"
//
// The helper processes of the backend then start before most other packages of the program are initialised. They use
// less memory, and a smaller process forks faster: cloister's own are half the size.
package earlyinit
