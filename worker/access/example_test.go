// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/worker/access"
	"google.golang.org/grpc"
)

// A server whose callers and rights an operator's file lists. The Live is also the Access of service.Config.
func ExampleNewLive() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "auth.yaml")
	const callers = "version: 1\ncallers:\n- {name: everyone, anonymous: true, rights: [read, execute: team/*]}\n"
	if err := os.WriteFile(file, []byte(callers), 0o600); err != nil {
		log.Panic(err)
	}
	live, err := access.NewLive(file, nil, nil)
	if err != nil {
		log.Panic(err)
	}
	defer live.Close()
	g := grpc.NewServer(append(casserver.ServerOptions(nil), live.Options()...)...)
	defer g.Stop()

	for _, instance := range []string{"team/a", "main"} {
		_, why, err := live.Rules().May("everyone", "execute", instance)
		fmt.Println(why, err)
	}
	// Output:
	// caller everyone has the right execute in team/* <nil>
	// caller everyone has the right execute only in team/* <nil>
}
