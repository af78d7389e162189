// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

func main() {
	r := &report{}
	r.stop("the attacks need Linux")
	r.hold("nothing")
	r.escape("nothing is confined here")
	r.exit()
}
