// SPDX-License-Identifier: Apache-2.0

//go:build commitpoints

package commit

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
)

// DieVar is an environment variable of the form NAME=N: the process kills itself at the Nth pass of point NAME.
const DieVar = "CLOISTER_TEST_DIE_AT"

var (
	where, after = dieAt()
	passed       atomic.Int64
)

func dieAt() (name string, n int64) {
	name, text, _ := strings.Cut(os.Getenv(DieVar), "=")
	n, _ = strconv.ParseInt(text, 10, 64)
	return name, n
}

// Point kills the process, like kill -9, if DieVar selects it.
func Point(name string) {
	if name != where || passed.Add(1) != after {
		return
	}
	fmt.Fprintf(os.Stderr, "killed at %s, pass %d\n", name, after)
	p, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = p.Kill()
	}
	if err != nil {
		panic(err)
	}
	select {}
}
