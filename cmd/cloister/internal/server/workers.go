// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"net"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
)

// workersConfig is the flags of serve that say who else executes actions.
type workersConfig struct {
	listen  string
	timeout time.Duration
	texts   []string // of properties

	properties []worker.Property
}

func (f *workersConfig) Register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.listen, "worker-listen", "", "address and port for machines that run cloister join (default: none)")
	flags.DurationVar(&f.timeout, "worker-timeout", time.Minute, "silence after which a worker is lost and its actions run elsewhere")
	flags.StringArrayVar(&f.texts, "property", nil, "platform property that this machine offers with --worker-listen, NAME=VALUE; repeatable (default: it takes every action)")
}

// matchHint says what to do about an action that no worker takes.
func matchHint(u queue.Unmatched) string {
	switch {
	case u.NoWorker:
		return "start one with cloister join, then retry"
	case len(u.Missing) == 0:
		return "use an instance that cloister status lists, or start a worker with cloister join --instance"
	}
	return fmt.Sprintf("add --property %s to its cloister join, or request an offered value", u.Missing[0])
}

// A workersPort is where workers of other machines take actions, and find all that they need for them.
type workersPort struct {
	listener   net.Listener
	server     *grpc.Server
	queue      *buildbarn.Server
	endUploads func()
}

// stop ends what the workers ask for.
func (p *workersPort) stop() {
	p.queue.Close()
	node.StopServer(p.server)
	p.endUploads() // the store waits for them when it is closed
}
