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

// DieVar is the environment variable NAME=N that says at which passing of which point the process kills itself,
// counted from 1.
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

// Point kills the process, as kill -9 would, if this is where it is to die.
func Point(name string) {
	if name != where || passed.Add(1) != after {
		return
	}
	fmt.Fprintf(os.Stderr, "killed at %s, passing %d\n", name, after)
	p, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = p.Kill()
	}
	if err != nil {
		panic(err)
	}
	select {}
}
