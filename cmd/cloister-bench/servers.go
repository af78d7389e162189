// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/cmd/internal/identity"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
)

// defaultAddress is where cloister serve listens by default.
const defaultAddress = "127.0.0.1:8980"

// serverFlags name the servers to measure.
type serverFlags struct {
	executor       string
	against, watch []string
	cas            []string // separate stores
	instance       string
	settle         bool
	credentials    identity.Flags // for --executor
	casCredentials identity.Flags // for its separate store
}

// register adds the flags of all servers. executor is the default address.
func (f *serverFlags) register(set *pflag.FlagSet, executor string) {
	set.StringVar(&f.executor, "executor", executor,
		"server, [NAME=]HOST:PORT or [NAME=]grpc[s]://HOST:PORT[/INSTANCE]; --tls-* and --token-file apply to it")
	set.StringArrayVar(&f.against, "against", nil, "another server, NAME=ADDRESS; repeatable")
	f.credentials.Register(set, "")
	set.StringArrayVar(&f.watch, "watch", nil, "server process to measure, NAME=PIDFILE; repeatable, even per server")
	set.BoolVar(&f.settle, "settle", false, "wait before each measurement until all watched processes are idle and their data is on disk")
}

// registerStores adds the flags of servers that execute actions.
func (f *serverFlags) registerStores(set *pflag.FlagSet) {
	set.StringArrayVar(&f.cas, "cas", nil,
		"separate store of a server, [NAME=]ADDRESS (default name: that of --executor); repeatable")
	f.casCredentials.Register(set, "cas-")
	set.StringVar(&f.instance, "instance", "", "instance for all addresses without one")
	flags.AllowEmpty(set, "instance")
}

// cutName splits NAME=VALUE.
func cutName(flag, text string) (name, value string, err error) {
	name, value, ok := strings.Cut(text, "=")
	if !ok || name == "" {
		return "", "", fmt.Errorf("--%s %q: write NAME=VALUE", flag, text)
	}
	return name, value, nil
}

// withInstance adds the instance of --instance to an address without one.
func (f *serverFlags) withInstance(address string) string {
	_, rest, found := strings.Cut(address, "://")
	if !found {
		rest = address
	}
	if f.instance == "" || strings.Contains(rest, "/") {
		return address
	}
	return address + "/" + f.instance
}

// withScheme adds grpc:// to an address without a scheme.
func withScheme(address string) string {
	if strings.Contains(address, "://") {
		return address
	}
	return "grpc://" + address
}

// storeCredentials returns the credentials for the store of the first server.
func (f *serverFlags) storeCredentials(server, store string) *identity.Flags {
	if f.casCredentials.Set() || !identity.SameServer(withScheme(server), withScheme(store)) {
		return &f.casCredentials
	}
	return &f.credentials
}

// dial connects to the servers. The caller closes them, also after an error.
func (f *serverFlags) dial(ctx context.Context) (servers []*load.Server, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if f.settle && len(f.watch) == 0 {
		return nil, exit.New(exit.Usage, errors.New("--settle needs --watch"))
	}
	if c := &f.casCredentials; c.CA+c.Cert+c.Key+c.Token != "" && len(f.cas) == 0 {
		return nil, exit.New(exit.Usage, fmt.Errorf("--%s need --cas", strings.Join(c.Names(), ", --")))
	}
	name, address, ok := strings.Cut(f.executor, "=")
	if !ok {
		name, address = "executor", f.executor
	}
	options, err := f.credentials.DialOptions(withScheme(address))
	if err != nil {
		return nil, err
	}
	first, err := load.Dial(ctx, name, f.withInstance(address), options...)
	if err != nil {
		return nil, withCode(err)
	}
	servers = append(servers, first)
	for _, text := range f.against {
		name, address, err := cutName("against", text)
		if err != nil {
			return servers, err
		}
		var options []grpc.DialOption // no credentials
		s, err := load.Dial(ctx, name, f.withInstance(address), options...)
		if err != nil {
			return servers, withCode(err)
		}
		servers = append(servers, s)
	}
	if err := f.dialStores(ctx, servers, address); err != nil {
		return servers, err
	}
	return servers, f.watchProcesses(servers)
}

// dialStores connects to the separate stores. address is that of the first server.
func (f *serverFlags) dialStores(ctx context.Context, servers []*load.Server, address string) error {
	for _, text := range f.cas {
		name, store, ok := strings.Cut(text, "=")
		if !ok {
			name, store = servers[0].Name, text
		}
		s, err := find(servers, "cas", name)
		if err != nil {
			return err
		}
		var options []grpc.DialOption
		if s == servers[0] {
			if options, err = f.storeCredentials(address, store).DialOptions(withScheme(store)); err != nil {
				return err
			}
		}
		if err := s.DialStore(ctx, f.withInstance(store), options...); err != nil {
			return withCode(err)
		}
	}
	return nil
}

func (f *serverFlags) watchProcesses(servers []*load.Server) error {
	for _, text := range f.watch {
		name, file, err := cutName("watch", text)
		if err != nil {
			return err
		}
		s, err := find(servers, "watch", name)
		if err != nil {
			return err
		}
		pid, err := readPID(file)
		if err == nil {
			err = s.Watch(pid)
		}
		if err != nil {
			return exit.New(exit.Environment, fmt.Errorf("--watch: %w", err))
		}
	}
	return nil
}

// readPID reads a process ID from a file.
func readPID(file string) (int, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid < 1 {
		return 0, fmt.Errorf("%s does not contain a process ID", file)
	}
	return pid, nil
}

// find returns the server that a flag names.
func find(servers []*load.Server, flag, name string) (*load.Server, error) {
	i := slices.IndexFunc(servers, func(s *load.Server) bool { return s.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("--%s: unknown server %q; --executor is named %q", flag, name, servers[0].Name)
	}
	return servers[i], nil
}

// withCode gives an error of load.Dial its exit code.
func withCode(err error) error {
	if errors.Is(err, load.ErrAddress) {
		return err
	}
	return exit.New(exit.Unreachable, err)
}
