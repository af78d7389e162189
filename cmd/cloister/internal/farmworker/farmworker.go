// SPDX-License-Identifier: Apache-2.0

// Package farmworker runs cloister join: a node that executes the actions of a scheduler.
package farmworker

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
	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/cmd/internal/identity"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/service"
	"github.com/cloister-build/cloister/worker/transport"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// Config is the flags and the argument of join.
type Config struct {
	node.Config
	Scheduler  string
	Identity   identity.Flags // at the scheduler
	name       string
	instance   string
	properties []string
	sizeClass  uint32
	browserURL string

	offers  []worker.Property // of properties
	browser *url.URL          // of browserURL
}

// Register adds the flags.
func (c *Config) Register(cmd *cobra.Command) {
	c.Config.Register(cmd)
	f := cmd.Flags()
	c.Identity.Register(f, "")
	c.Upstream.Identity.Register(f, "cas-")
	f.StringVar(&c.Upstream.Server, "cas", "", "server with the store and the action cache: grpc://HOST:PORT[/INSTANCE] or grpcs:// (default: ADDRESS)")
	f.StringVar(&c.Upstream.Bucket, "store", "", "bucket with the store and the action cache: s3://BUCKET[/PREFIX] or gs://BUCKET[/PREFIX]")
	cmd.MarkFlagsMutuallyExclusive("cas", "store")
	f.StringVar(&c.Scheduler, "scheduler", "", "address of the scheduler, instead of ADDRESS, for configuration files")
	f.StringVar(&c.name, "name", "", "name of this worker, unique at the scheduler (default: the host name)")
	f.StringVar(&c.instance, "instance", "", "instance to take actions from, with those below it (default: all)")
	f.StringArrayVar(&c.properties, "property", nil, "platform property that this worker offers, NAME=VALUE; repeatable, also with the same name")
	f.Uint32Var(&c.sizeClass, "size-class", 0, "size class of this worker, if the scheduler uses size classes")
	f.StringVar(&c.browserURL, "browser-url", "", "base URL of Buildbarn's browser, for links in result messages")
}

// Check validates the command line.
func (c *Config) Check(cmd *cobra.Command) (err error) {
	if u, err := url.Parse(c.Scheduler); err != nil || (u.Scheme != "grpc" && u.Scheme != "grpcs") || u.Port() == "" || strings.Trim(u.Path, "/") != "" || u.User != nil || u.RawQuery != "" {
		return errors.New("invalid scheduler address: write grpc://HOST:PORT or grpcs://HOST:PORT, and pass an instance with --instance")
	}
	if err := cas.CheckInstanceName(c.instance); err != nil {
		return fmt.Errorf("--instance: %w", err)
	}
	if c.offers, err = flags.ParseProperties(c.properties); err != nil {
		return err
	}
	c.offers = append(c.offers, c.Sandbox.Offers()...)
	slices.SortFunc(c.offers, worker.Property.Compare)
	if c.browserURL != "" {
		if c.browser, err = url.Parse(c.browserURL); err != nil || c.browser.Host == "" {
			return fmt.Errorf("--browser-url %q: write http://HOST[:PORT][/PATH]", c.browserURL)
		}
	}
	// Clients of the scheduler read a result as soon as it is reported, so its blobs must be in the store by then.
	c.Upstream.WriteMode = "through"
	c.Upstream.RenewInterval = -1 // the scheduler renews what its clients use
	c.Upstream.Instance = c.instance
	if err := c.Config.Check(cmd); err != nil {
		return err
	}
	if c.Upstream.Server == "" && c.Upstream.Bucket == "" {
		c.Upstream.Server = c.Scheduler
	}
	// A credential goes only to the server that it was named for.
	if identity.SameServer(c.Upstream.Server, c.Scheduler) && !c.Upstream.Identity.Set() {
		c.Upstream.Identity = c.Identity
	}
	return nil
}

// Run executes actions until a signal or ctx ends it.
func Run(ctx context.Context, c *Config, out io.Writer) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	log := slog.Default()

	scheduler, err := c.dial()
	if err != nil {
		return err
	}
	defer scheduler.Close()
	n, err := node.Open(ctx, &c.Config, log)
	if err != nil {
		return err
	}
	defer n.Close()
	if c.name != "" {
		n.Name = c.name
	}
	if err := n.Start(ctx, nil); err != nil {
		return err
	}
	id, err := storeID(n.Dir)
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	config := n.Assembly(c.reproduceFlags)
	config.Join = buildbarn.ClientConfig{
		Store: id, Prefix: c.instance, Properties: c.offers, SizeClass: c.sizeClass, Ready: n.CheckReady, Browser: c.browser,
	}
	client, err := service.NewWorker(ctx, scheduler, config)
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	defer n.Attach(client)()
	n.Ready.Scheduler = client.Down
	n.Upstream.Probe(ctx, node.StartupProbe, log) // so that the first action does not wait for it
	if err := n.ServeMetrics(); err != nil {
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
	if err := n.NotifyReady(func() string { return fmt.Sprintf("%d running", client.Busy()) }); err != nil {
		cancel()
		<-ended
		return err
	}
	select {
	case <-ctx.Done():
	case <-signals:
	}
	n.Ready.Draining.Store(true)
	n.Service.Stopping()
	drain(out, c.DrainTimeout, signals, client, ended, cancel)
	return nil
}

// drain waits for running actions until limit or the next signal, and then cancels them. ended is closed when the
// client has stopped.
func drain(out io.Writer, limit time.Duration, signals <-chan os.Signal, client *service.Worker, ended <-chan struct{}, cancel func()) {
	client.Drain()
	if busy := client.Busy(); busy > 0 {
		fmt.Fprintf(out, "draining %d running; Ctrl-C again gives them back\n", busy)
	}
	patient, stop := node.DrainContext(limit, signals)
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
			fmt.Fprintln(out, "stopped  running actions were cancelled and returned")
		default:
			fmt.Fprintf(out, "stopped  running actions were cancelled; %s\n", down)
		}
	}
}

// storeID returns the random name of a store directory, which one process at a time can lock. It stays the same when a
// worker restarts, and distinguishes workers of the same name.
func storeID(dir string) (string, error) {
	path := filepath.Join(dir, "worker.id")
	data, err := durable.ReadFile(path)
	if id := strings.TrimSpace(string(data)); err == nil && storeIDs.MatchString(id) {
		return id, nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	id := strings.ToLower(rand.Text()) // replacing a damaged one keeps the worker out for at most a minute
	return id, durable.WriteFile(path, []byte(id+"\n"), 0o600)
}

// storeIDs matches a valid store ID.
var storeIDs = regexp.MustCompile(`^[a-z0-9]{26,64}$`)

// reproduceFlags returns the flags with which a command on this machine runs an action as this worker does.
func (c *Config) reproduceFlags() []string {
	if c.Upstream.Server == "" {
		return c.RunFlags()
	}
	return slices.Concat([]string{"--server", c.Upstream.Server}, c.RunFlags())
}

// dial returns a connection to the scheduler, which need not be reachable yet. The caller closes it.
func (c *Config) dial() (*grpc.ClientConn, error) {
	conn, _, err := transport.Dial(c.Scheduler, c.Identity.Credentials(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: time.Second, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 10 * time.Second,
		}),
		// A call that waits for an action is silent for minutes. Most servers reject frequent HTTP/2 pings as an
		// attack, but TCP keepalives notice a cut network within half a minute.
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}, Control: tcpTimeout}
			return d.DialContext(ctx, "tcp", address)
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)), // an action with the client's metadata
	)
	return conn, c.Identity.Explain(c.Scheduler, err)
}

// banner prints the properties of a worker that has just started.
func (c *Config) banner(out io.Writer, n *node.Node) {
	n.Banner(out)
	if len(c.offers) > 0 {
		var texts []string
		for _, p := range c.offers {
			texts = append(texts, p.String())
		}
		fmt.Fprintf(out, "offers   %s\n", strings.Join(texts, ", "))
	}
	instances := "all instances"
	if c.instance != "" {
		instances = "instance " + c.instance + " and those below it"
	}
	// Programs wait for the last line.
	fmt.Fprintf(out, "upstream %s   (write %s)\njoins    %s as %s, for %s\n", c.Upstream.Server+c.Upstream.Bucket, c.Upstream.WriteMode, c.Scheduler, n.Name, instances)
}
