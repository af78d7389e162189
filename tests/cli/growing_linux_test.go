// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
)

// A commandBlock is a block of commands of a document, with the machine to type them on.
type commandBlock struct {
	section, where string
	lines          []string
}

// blocksOf returns the blocks of a document that name a machine.
func blocksOf(t *testing.T, document string) []commandBlock {
	t.Helper()
	text := orPanic(os.ReadFile(document))
	var all []commandBlock
	section, inside := "", false
	var block []string
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case line == "```" && inside:
			if where, ok := strings.CutPrefix(block[0], "# on "); ok {
				all = append(all, commandBlock{section, where, block[1:]})
			}
			inside, block = false, nil
		case strings.HasPrefix(line, "```"):
			inside = true
		case inside:
			block = append(block, line)
		case strings.HasPrefix(line, "## "):
			section = strings.TrimPrefix(line, "## ")
		}
	}
	return all
}

// A machine is a machine of the document, simulated by directories and services on this one.
type machine struct {
	*network
	name     string
	dir      string
	services map[string]*service
}

// A network has all machines of the document.
type network struct {
	dir      string            // contains a directory per machine, and bin
	ports    map[string]string // real ports by the document's HOST:PORT
	machines map[string]*machine
}

// A service is a running service of a machine.
type service struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has ended, after err is set
	err   error
	said  syncbuf.Buffer
}

// stop sends SIGTERM to the service and fails the test if it ends with an error.
func (s *service) stop(t *testing.T) {
	t.Helper()
	_ = s.cmd.Process.Signal(syscall.SIGTERM) // fails only if it has ended
	select {
	case <-s.ended:
		expect.That(t, s.err == nil, "%q ended: %v\n%s", s.cmd.Args, s.err, &s.said)
	case <-time.After(patience):
		s.kill()
		t.Errorf("%q does not end:\n%s", s.cmd.Args, &s.said)
	}
}

func (s *service) kill() {
	_ = s.cmd.Process.Kill() // as above
	<-s.ended
}

// Substitutes for programs that the test cannot use. bazel applies its bazelrc to cloister-bench.
const (
	nothing = "#!/bin/sh\n"
	copies  = "#!/bin/sh\nexec cp \"$@\"\n"
	bazel   = `#!/bin/sh -e
say() { sed -n "s/^build --$1=//p" ~/cloister.bazelrc; }
token=$(say remote_header | sed 's/.*Bearer \([0-9a-f]*\).*/\1/')
test "$token" = "" || export CLOISTER_TOKEN="$token"
set -- --tls-ca "$(say tls_certificate)" --platform "$(say remote_default_exec_properties)"
test "$2" != "" || set --
exec cloister-bench noop --actions 10 --rounds 1 --local-time 20ms --executor "$(say remote_executor)" \
	--instance "$(say remote_instance_name)" "$@"
`
)

// newNetwork returns a network without machines.
func newNetwork(t *testing.T) *network {
	t.Helper()
	c := &network{dir: t.TempDir(), ports: map[string]string{}, machines: map[string]*machine{}}
	bin := filepath.Join(c.dir, "bin")
	must.Succeed(t, os.Mkdir(bin, 0o755))
	must.Succeed(t, os.Symlink(built.Path(t), filepath.Join(bin, "cloister")))
	must.Succeed(t, bazelrun.BuildCommand(filepath.Join(bin, "cloister-bench"), "cloister-bench"))
	for name, text := range map[string]string{"apt": nothing, "chgrp": nothing, "scp": copies, "bazel": bazel} {
		must.Succeed(t, os.WriteFile(filepath.Join(bin, name), []byte(text), 0o755))
	}
	return c
}

// at returns the named machine and makes it if necessary.
func (c *network) at(t *testing.T, name string) *machine {
	t.Helper()
	p := c.machines[name]
	if p == nil {
		p = &machine{network: c, name: name, dir: filepath.Join(c.dir, name), services: map[string]*service{}}
		c.machines[name] = p
		for _, dir := range []string{"etc", "var", "home"} {
			must.Succeed(t, os.MkdirAll(filepath.Join(p.dir, dir), 0o700))
		}
	}
	return p
}

var (
	remotePattern  = regexp.MustCompile(`\b(?:root@)?([a-z][a-z0-9-]*):/etc/cloister/`)
	addressPattern = regexp.MustCompile(`\b(127\.0\.0\.1|0\.0\.0\.0|box|build-\d):(\d{4})\b`)
	namePattern    = regexp.MustCompile(`(DNS:|CN=)box\b`)
)

// here translates a line for this machine: files become the machine's own, host names become localhost, and ports free
// ones.
func (p *machine) here(t *testing.T, line string) string {
	t.Helper()
	line = remotePattern.ReplaceAllStringFunc(line, func(s string) string {
		return p.at(t, remotePattern.FindStringSubmatch(s)[1]).dir + "/etc/"
	})
	line = strings.ReplaceAll(line, "/etc/cloister", p.dir+"/etc")
	line = strings.ReplaceAll(line, "/var/lib", p.dir+"/var")
	line = namePattern.ReplaceAllString(line, "${1}localhost")
	return addressPattern.ReplaceAllStringFunc(line, func(s string) string {
		host, port, _ := strings.Cut(s, ":")
		as := "localhost"
		if strings.HasSuffix(host, ".0.0.1") || host == "0.0.0.0" {
			host, as = p.name, "127.0.0.1"
		}
		key := host + ":" + port
		if p.ports[key] == "" {
			p.ports[key] = unusedPort()
		}
		return as + ":" + p.ports[key]
	})
}

// unusedPort returns an unused port of 127.0.0.1, below those that the kernel gives to connections of any program
// (ip(7), ip_local_port_range).
func unusedPort() string {
	for {
		port := strconv.Itoa(10_000 + rand.IntN(20_000))
		if l, err := net.Listen("tcp4", "127.0.0.1:"+port); err == nil {
			l.Close()
			return port
		}
	}
}

// environment returns the environment of programs on the machine.
func (p *machine) environment() []string {
	path := p.network.dir + "/bin:/usr/local/bin:/usr/bin:/bin"
	return []string{"HOME=" + p.dir + "/home", "LANG=C.UTF-8", "PATH=" + path}
}

// types runs commands in order, as if typed on the machine, and returns their output.
func (p *machine) types(t *testing.T, lines []string) string {
	t.Helper()
	var all strings.Builder
	var script []string
	flush := func() {
		if len(script) == 0 {
			return
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, "/bin/sh", "-e", "-c", strings.Join(script, "\n"))
		cmd.Dir, cmd.Env = p.dir+"/home", p.environment()
		out, err := cmd.CombinedOutput()
		if err != nil {
			for name, s := range p.every() {
				t.Logf("%s said:\n%s", name, &s.said)
			}
			t.Fatalf("on %s:\n%s\n%v:\n%s", p.name, strings.Join(script, "\n"), err, out)
		}
		all.Write(out)
		script = nil
	}
	for _, line := range lines {
		words := strings.Fields(line)
		switch {
		case strings.HasPrefix(line, "systemctl "):
			flush()
			p.systemctl(t, words[1:])
		case line == "cloister serve":
			flush()
			p.start(t, "laptop", "serve", "--listen", p.here(t, "127.0.0.1:8980"), "--dir", p.dir+"/var/laptop")
		default:
			script = append(script, p.here(t, line))
		}
	}
	flush()
	return all.String()
}

// every returns all services of all machines.
func (c *network) every() map[string]*service {
	all := map[string]*service{}
	for _, p := range c.machines {
		for name, s := range p.services {
			all[p.name+" "+name] = s
		}
	}
	return all
}

// systemctl imitates systemctl for our units.
func (p *machine) systemctl(t *testing.T, words []string) {
	t.Helper()
	unit := words[len(words)-1]
	switch verb := strings.Join(words[:len(words)-1], " "); verb {
	case "enable --now", "restart":
		if s := p.services[unit]; s != nil {
			s.stop(t)
		}
		text := string(orPanic(os.ReadFile("../../cmd/packaging/systemd/" + unit + ".service")))
		command := regexp.MustCompile(`(?m)^ExecStart=/usr/bin/cloister (.*)$`).FindStringSubmatch(text)
		must.Be(t, command != nil, "the unit %s does not say what it starts:\n%s", unit, text)
		args := append(strings.Fields(p.here(t, command[1])), "--config", p.here(t, "/etc/cloister/config.yaml"))
		if args[0] == "join" {
			args = append(args, "--name", p.name)
		}
		p.start(t, unit, args...)
	case "kill --signal=KILL":
		p.services[unit].kill()
		delete(p.services, unit)
		p.systemctl(t, []string{"restart", unit}) // Restart=on-failure
	default:
		t.Fatalf("systemctl %s %s: not known to this test", verb, unit)
	}
}

// start starts a service and returns when it notifies systemd that it is ready.
func (p *machine) start(t *testing.T, name string, args ...string) {
	t.Helper()
	socket := filepath.Join(p.dir, fmt.Sprint(name, ".notify"))
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	manager := must.Get(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"}))(t)
	s := &service{cmd: exec.Command(filepath.Join(p.network.dir, "bin/cloister"), args...), ended: make(chan struct{})}
	s.cmd.Dir, s.cmd.Env = "/", append(p.environment(), "NOTIFY_SOCKET="+socket)
	s.cmd.Stdout, s.cmd.Stderr = &s.said, &s.said
	must.Succeed(t, s.cmd.Start())
	p.services[name] = s
	ready := make(chan struct{})
	go func() {
		s.err = s.cmd.Wait()
		close(s.ended)
		manager.Close()
	}()
	go func() {
		said := false
		for b := make([]byte, 4096); ; {
			n, err := manager.Read(b)
			if err != nil {
				return // the service has ended
			}
			if bytes.HasPrefix(b[:n], []byte("READY=1")) && !said {
				said = true
				close(ready)
			}
		}
	}()
	select {
	case <-ready:
	case <-s.ended:
		t.Fatalf("%s %q ended before it was ready: %v\n%s", p.name, args, s.err, &s.said)
	case <-time.After(patience):
		t.Fatalf("%s %q is not ready:\n%s", p.name, args, &s.said)
	}
}

// close stops all services, workers before their head.
func (c *network) close(t *testing.T) {
	for _, unit := range []string{"cloister-join", "cloister", "laptop"} {
		for _, p := range c.machines {
			if s := p.services[unit]; s != nil {
				s.stop(t)
			}
		}
	}
}

// TestGrowing runs the commands of docs/growing.md, steps 1 to 3, from one machine to a head with two workers. The
// section "How this is tested" lists the differences from real machines.
func TestGrowing(t *testing.T) {
	confined(t)
	for _, name := range []string{"openssl", "curl", "sha256sum"} {
		sandboxtest.Tool(t, name)
	}
	c := newNetwork(t)
	t.Cleanup(func() { c.close(t) })
	machine := regexp.MustCompile(`box|build-\d|your laptop`)
	said := map[string]string{} // by section
	for _, b := range blocksOf(t, "../../docs/growing.md") {
		if !slices.Contains([]string{"1", "2", "3"}, strings.Split(b.section, " ")[0]) {
			continue
		}
		where := machine.FindAllString(b.where, -1)
		must.Be(t, len(where) != 0, "a block of section %q is typed on %q: which machine is that", b.section, b.where)
		for _, name := range where {
			said[b.section] += c.at(t, strings.TrimPrefix(name, "your ")).types(t, b.lines)
		}
	}
	for section, wants := range map[string][]string{
		"1 A laptop":           {"tier  full", "exit 0"},
		"2 A team box":         {"ready"},
		"3 A head and workers": {"build-1", "build-2", "drained"},
	} {
		for _, want := range wants {
			expect.That(t, strings.Contains(strings.ToLower(said[section]), want),
				"section %q says nothing of %q:\n%s", section, want, said[section])
		}
	}
	// While build-1 was drained, build-2 executed actions.
	status := "cloister status --server grpcs://box:8980 --tls-ca ~/box.pem --token-file ~/operate.token"
	last := c.at(t, "laptop").types(t, []string{status})
	for _, name := range []string{"build-1", "build-2"} {
		expect.That(t, regexp.MustCompile(`(?m)^`+name+` +working +0/\d+ +[1-9]`).MatchString(last),
			"%s has executed nothing, or takes no actions:\n%s", name, last)
	}
	if t.Failed() {
		for name, s := range c.every() {
			t.Logf("%s said:\n%s", name, &s.said)
		}
	}
	if testing.Verbose() {
		for section, text := range said {
			t.Logf("%s:\n%s", section, text)
		}
	}
}
