// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

// joinConfig is what the flags of join say.
type joinConfig struct {
	nodeConfig
	scheduler  string
	who        identity // at the scheduler
	name       string
	instance   string
	properties []string
	sizeClass  uint32
	browserURL string

	offers  []worker.Property // of properties
	browser *url.URL          // of browserURL
}

func joinCommand() *cobra.Command {
	c := joinConfig{nodeConfig: newNodeConfig()}
	c.fleet = true
	cmd := &cobra.Command{
		Use:   "join ADDRESS",
		Short: "Executes actions that a scheduler hands out",
		Long: `Join takes actions from the scheduler at ADDRESS, grpc://HOST:PORT or grpcs://HOST:PORT, and executes them in
the sandbox as serve does. The scheduler is cloister serve --worker-listen, or Buildbarn's bb_scheduler.

Inputs come from the store at --cas, and outputs go there: it is the one that the scheduler's clients use. The
directory is in front of it, so that what was used lately is near. Without --cas the scheduler has the store, as
cloister serve does.

Each of the --jobs is a worker of its own to the scheduler. It takes no action while the store does not answer or
the disk is full. Ctrl-C drains: running actions finish; a second Ctrl-C, or the end of --drain-timeout, gives them
back. docs/farm.md says more.`,
		Example: `  cloister join grpc://head:8983
  cloister join grpcs://head:8983 --tls-cert w.pem --tls-key w.key --property OSFamily=linux --property pool=big
  cloister join grpc://bb-scheduler:8983 --cas grpc://bb-storage:8980 --instance main \
      --property OSFamily=linux --property container-image=docker://ghcr.io/example/image@sha256:...`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c.scheduler = args[0]
			if err := c.check(cmd); err != nil {
				return err
			}
			return join(cmd.Context(), &c, cmd.OutOrStdout())
		},
	}
	c.register(cmd)
	return cmd
}

func (c *joinConfig) register(cmd *cobra.Command) {
	c.nodeConfig.register(cmd)
	f := cmd.Flags()
	c.who.register(f, "")
	c.far.who.register(f, "cas-")
	f.StringVar(&c.far.cas, "cas", "", "server with the store and the action cache: grpc://HOST:PORT[/INSTANCE] or grpcs:// (default: ADDRESS)")
	f.StringVar(&c.far.store, "store", "", "a bucket that has both: s3://BUCKET[/PREFIX] or gs://BUCKET[/PREFIX]")
	cmd.MarkFlagsMutuallyExclusive("cas", "store")
	f.StringVar(&c.name, "name", "", "name of this worker, which no other of the scheduler has (default: the host's)")
	f.StringVar(&c.instance, "instance", "", "take actions of this instance and of those below it (default: all)")
	f.StringArrayVar(&c.properties, "property", nil, "platform property that actions may demand, NAME=VALUE; repeatable, also with the same name")
	f.Uint32Var(&c.sizeClass, "size-class", 0, "size of this worker among those of the platform, where the scheduler has such")
	f.StringVar(&c.browserURL, "browser-url", "", "where Buildbarn's browser shows what is in the store, for a link in the message of each result")
}

// check returns what is wrong with the command line, before anything is made.
func (c *joinConfig) check(cmd *cobra.Command) (err error) {
	if u, err := url.Parse(c.scheduler); err != nil || (u.Scheme != "grpc" && u.Scheme != "grpcs") || u.Port() == "" || strings.Trim(u.Path, "/") != "" || u.User != nil || u.RawQuery != "" {
		return errors.New("the address of a scheduler is grpc://HOST:PORT or grpcs://HOST:PORT; instances are chosen by --instance")
	}
	if err := cas.CheckInstanceName(c.instance); err != nil {
		return fmt.Errorf("--instance: %w", err)
	}
	if c.offers, err = parseProperties(c.properties); err != nil {
		return err
	}
	if c.browserURL != "" {
		if c.browser, err = url.Parse(c.browserURL); err != nil || c.browser.Host == "" {
			return fmt.Errorf("--browser-url %q: write it as http://HOST[:PORT][/PATH]", c.browserURL)
		}
	}
	// What a scheduler tells its clients of is in the store by then.
	c.far.write = "through"
	if err := c.nodeConfig.check(cmd); err != nil {
		return err
	}
	if c.far.cas == "" && c.far.store == "" {
		c.far.cas = c.scheduler
	}
	// Another server is shown nothing that was not stated for it.
	if sameServer(c.far.cas, c.scheduler) && !c.far.who.stated() {
		c.far.who = c.who
	}
	return nil
}

// join runs until a signal or ctx ends it.
func join(ctx context.Context, c *joinConfig, out io.Writer) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))

	scheduler, err := c.dial()
	if err != nil {
		return err
	}
	defer scheduler.Close()
	n, err := openNode(ctx, &c.nodeConfig, log)
	if err != nil {
		return err
	}
	defer n.close()
	if c.name != "" {
		n.name = c.name
	}
	if err := n.confine(ctx); err != nil {
		return err
	}
	if err := n.start(ctx, c.reproduce(), nil); err != nil {
		return err
	}
	id, err := storeID(n.dir)
	if err != nil {
		return newExit(exitEnvironment, err)
	}
	client, err := buildbarn.NewClient(buildbarn.ClientConfig{
		Scheduler: remoteworkerpb.NewOperationQueueClient(scheduler),
		Executor:  n.telemetry.Executor(n.local), Instances: n.instances,
		Worker: n.name, Store: id, Slots: c.jobs, Prefix: c.instance, Properties: c.offers, SizeClass: c.sizeClass,
		Ready: n.able, Browser: c.browser, Log: log,
	})
	if err != nil {
		return err
	}
	n.ready.scheduler = client.Down
	n.behind.ask(ctx, askedLimit, log) // so that the first action need not wait for it
	if err := n.serveMetrics(ofClient(client)...); err != nil {
		return err
	}

	c.banner(out, n)
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	ended := make(chan struct{})
	go func() {
		client.Run(running)
		close(ended)
	}()
	if err := n.tellManager(func() string { return fmt.Sprintf("%d running", client.Busy()) }); err != nil {
		cancel()
		<-ended
		return err
	}
	select {
	case <-ctx.Done():
	case <-signals:
	}
	n.ready.draining.Store(true)
	n.service.Stopping()
	client.Drain()
	if busy := client.Busy(); busy > 0 {
		fmt.Fprintf(out, "draining %d running; Ctrl-C again gives them back\n", busy)
	}
	patient, stop := patience(c.drainTimeout, signals)
	defer stop()
	select {
	case <-ended:
	case <-patient.Done():
		busy := client.Busy()
		cancel()
		<-ended
		switch down := client.Down(); {
		case busy == 0:
		case down == "":
			fmt.Fprintln(out, "stopped  running actions were cancelled, and the scheduler told")
		default:
			fmt.Fprintf(out, "stopped  running actions were cancelled; %s\n", down)
		}
	}
	return nil
}

// storeID returns what names a store's directory, of which one process at a time has the lock: the same for a worker that is
// started again, and another for a second one of the same name. It is random, and made when it is asked for the first time.
func storeID(dir string) (string, error) {
	path := filepath.Join(dir, "worker.id")
	data, err := os.ReadFile(path)
	if id := strings.TrimSpace(string(data)); err == nil && storeIDs.MatchString(id) {
		return id, nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	id := strings.ToLower(rand.Text()) // one that is damaged is made anew: nobody is kept out by that for longer than a minute
	return id, writeDurably(path, id+"\n")
}

var storeIDs = regexp.MustCompile(`^[a-z0-9]{26,64}$`)

// able says why no action can be executed now.
func (n *node) able() error {
	if reasons := n.ready.unable(); len(reasons) > 0 {
		return errors.New(strings.Join(reasons, "; "))
	}
	return nil
}

// ofClient are the readings of a client of a scheduler.
func ofClient(client *buildbarn.Client) []reading {
	return []reading{
		{"cloister_actions_running", "Actions that have a slot.", func() float64 { return float64(client.Busy()) }},
		{"cloister_slots", "How many actions can run at once.", func() float64 { return float64(client.Slots) }},
		{"cloister_scheduler_up", "1 if the scheduler answers.", func() float64 { return truth(client.Down() == "") }},
	}
}

// reproduce returns what a command on this machine must be told to run an action as this worker does.
func (c *joinConfig) reproduce() []string {
	if c.far.cas == "" {
		return c.flags()
	}
	return slices.Concat([]string{"--cas", c.far.cas}, c.flags())
}

// dial returns a connection to the scheduler, which need not be there yet. The caller closes it.
func (c *joinConfig) dial() (*grpc.ClientConn, error) {
	options, err := c.who.options(c.scheduler)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(c.scheduler)
	if err != nil {
		return nil, newExit(exitUsage, err)
	}
	options = append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: time.Second, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 10 * time.Second,
		}),
		// A call that waits for an action is silent for minutes. Pings of HTTP/2 so often are an attack to most servers; the
		// kernel's own notice a network that was cut within half a minute.
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}, Control: giveUp}
			return d.DialContext(ctx, "tcp", address)
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16 << 20)), // an action, and the client's metadata
	}, options...)
	conn, err := grpc.NewClient(u.Host, options...)
	if err != nil {
		return nil, newExit(exitUsage, fmt.Errorf("%s: %w", c.scheduler, err))
	}
	return conn, nil
}

// banner prints what somebody wants to know who has just started it.
func (c *joinConfig) banner(out io.Writer, n *node) {
	n.banner(out)
	if len(c.offers) > 0 {
		var texts []string
		for _, p := range c.offers {
			texts = append(texts, p.String())
		}
		fmt.Fprintf(out, "offers   %s\n", strings.Join(texts, ", "))
	}
	instances := "all instances"
	if c.instance != "" {
		instances = "instance " + c.instance + " and those below"
	}
	// Programs take the last line for a sign that all has been said.
	fmt.Fprintf(out, "upstream %s   (write %s)\njoins    %s as %s, for %s\n", c.far.cas+c.far.store, c.far.write, c.scheduler, n.name, instances)
}
