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
	"github.com/cloister-build/cloister/cmd/internal/identity"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
)

// defaultAddress is where cloister serve listens by default.
const defaultAddress = "127.0.0.1:8980"

// peers is the flags that name the measured servers.
type peers struct {
	executor       string
	against, watch []string
	cas            []string // apart from their servers
	instance       string
	who            identity.Flags // at the server of executor
	whoAtStore     identity.Flags // at its store, if that is another server
}

// register adds the flags; executor is the default of the first server.
func (p *peers) register(f *pflag.FlagSet, executor string) {
	f.StringVar(&p.executor, "executor", executor, "the server: HOST:PORT, grpc:// or grpcs://HOST:PORT[/INSTANCE], with NAME= before it or not; --tls-... and --token-file are for it alone")
	f.StringArrayVar(&p.against, "against", nil, "another server, NAME=ADDRESS; repeatable")
	p.who.Register(f, "")
	f.StringArrayVar(&p.watch, "watch", nil, "measure what a server's process uses, NAME=PIDFILE; repeatable, also for one server")
}

// registerStores adds the flags of servers that execute.
func (p *peers) registerStores(f *pflag.FlagSet) {
	f.StringArrayVar(&p.cas, "cas", nil, "where a server's blobs are, if not at its address: [NAME=]ADDRESS, NAME being that of --executor if left out; repeatable")
	p.whoAtStore.Register(f, "cas-")
	f.StringVar(&p.instance, "instance", "", "instance at all servers whose address does not name one")
}

// named splits NAME=VALUE.
func named(flag, text string) (name, value string, err error) {
	name, value, ok := strings.Cut(text, "=")
	if !ok || name == "" {
		return "", "", fmt.Errorf("--%s %q: write NAME=VALUE", flag, text)
	}
	return name, value, nil
}

// address adds --instance to an address without an instance.
func (p *peers) address(text string) string {
	_, rest, found := strings.Cut(text, "://")
	if !found {
		rest = text
	}
	if p.instance == "" || strings.Contains(rest, "/") {
		return text
	}
	return text + "/" + p.instance
}

// withScheme adds the default scheme to an address.
func withScheme(address string) string {
	if strings.Contains(address, "://") {
		return address
	}
	return "grpc://" + address
}

// atStore returns the credentials for the store of the first server, at address.
func (p *peers) atStore(server, address string) *identity.Flags {
	if p.whoAtStore.Set() || !identity.SameServer(withScheme(server), withScheme(address)) {
		return &p.whoAtStore
	}
	return &p.who
}

// dial connects to the servers. The caller closes them, also after an error.
func (p *peers) dial(ctx context.Context) ([]*load.Server, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	name, address, ok := strings.Cut(p.executor, "=")
	if !ok {
		name, address = "executor", p.executor
	}
	names, addresses := []string{name}, []string{address}
	if w := &p.whoAtStore; w.CA+w.Cert+w.Key+w.Token != "" && len(p.cas) == 0 {
		return nil, exit.New(exit.Usage, fmt.Errorf("--%s need --cas", strings.Join(w.Names(), ", --")))
	}
	for _, text := range p.against {
		name, address, err := named("against", text)
		if err != nil {
			return nil, err
		}
		names, addresses = append(names, name), append(addresses, address)
	}
	var servers []*load.Server
	for i, name := range names {
		var options []grpc.DialOption
		if i == 0 {
			var err error
			if options, err = p.who.DialOptions(withScheme(address)); err != nil {
				return nil, err
			}
		}
		s, err := load.Dial(ctx, name, p.address(addresses[i]), options...)
		if err != nil {
			return servers, unreached(err)
		}
		servers = append(servers, s)
	}
	for _, text := range p.cas {
		name, address, ok := strings.Cut(text, "=")
		if !ok {
			name, address = servers[0].Name, text
		}
		s, err := find(servers, "cas", name)
		if err != nil {
			return servers, err
		}
		var options []grpc.DialOption
		if s == servers[0] {
			if options, err = p.atStore(addresses[0], address).DialOptions(withScheme(address)); err != nil {
				return servers, err
			}
		}
		if err := s.DialStore(ctx, p.address(address), options...); err != nil {
			return servers, unreached(err)
		}
	}
	for _, text := range p.watch {
		name, file, err := named("watch", text)
		if err != nil {
			return servers, err
		}
		s, err := find(servers, "watch", name)
		if err != nil {
			return servers, err
		}
		pid, err := readPID(file)
		if err == nil {
			err = s.Watch(pid)
		}
		if err != nil {
			return servers, exit.New(exit.Environment, fmt.Errorf("--watch: %w", err))
		}
	}
	return servers, nil
}

// readPID reads a process ID from a file.
func readPID(file string) (int, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid < 1 {
		return 0, fmt.Errorf("%s does not hold a process ID", file)
	}
	return pid, nil
}

// find returns the server that a flag names.
func find(servers []*load.Server, flag, name string) (*load.Server, error) {
	i := slices.IndexFunc(servers, func(s *load.Server) bool { return s.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("--%s: no server is called %q; the one of --executor is called %q", flag, name, servers[0].Name)
	}
	return servers[i], nil
}

// unreached gives an error of load.Dial its exit code.
func unreached(err error) error {
	if errors.Is(err, load.ErrAddress) {
		return err
	}
	return exit.New(exit.Unreachable, err)
}
