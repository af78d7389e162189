// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/guestkernel"
	"github.com/cloister-build/cloister/tests/internal/ca"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/rogpeppe/go-internal/testscript"
)

// TestScripts runs the stories in testdata/script. A story may run the program, which is in its PATH:
//
//	cloister CODE ARGS...    run it, and check its exit code and with --json that its output conforms to its schema
//	client CODE ARGS...      the same, with --cas and --instance of the current server
//	store CODE ARGS...       the same, with --dir of the current server
//	usage REGEXP ARGS...     check that it reports a usage error
//	without KIND CODE CMD... run any command where no namespaces of a kind are left
//
// start servers and workers, which end with the story:
//
//	serve [NAME] FLAGS...    start a server; again in its directory, if NAME did so before
//	join NAME FLAGS...       start a worker of the current server
//	use NAME                 make a server the current one: $CAS, $ADDR, $DIR, $PID, $WORKERS
//	end NAME                 SIGTERM, and wait for its end without an error
//	drain NAME               SIGTERM, without waiting
//	crash NAME               SIGKILL
//	waitlog NAME REGEXP      wait until the file NAME.log, which has its output, matches
//
// execute actions, each with one input, the file input, and one output, the file out:
//
//	execute [FLAGS] NAME SCRIPT  execute a shell script; print status, exit code, worker and message
//	begin [FLAGS] NAME [SCRIPT]  the same in the background; the default script waits for release
//	running NAME                 wait until it runs
//	release NAME                 send it SIGUSR1, and wait for its result
//	finish NAME                  wait for its result
//	abandon NAME                 cancel the call that waits for its result
//	gone NAME                    check that none of its processes is left
//
// These set $NAME to the digest of the action, and NAME_out and NAME_op to its output and its operation. And:
//
//	get URL                  print the status and body of http://URL
//	health [SERVICE]         print the health of the current server
//	until REGEXP CMD...      repeat a command that looks at something until its output matches
//	capture NAME REGEXP      set a variable to the first submatch in the last standard output
//	port NAME                set a variable to an unused address
//	authority, certificate NAME  write ca.pem, and NAME.pem with NAME.key
//	https NAME               serve HTTPS with such a certificate at $NAME, an address of this machine, and nothing at $NAME_closed
//	trusting CODE CMD...     run any command where the machine trusts only ca.pem, a link in /etc/ssl/certs as Debian has it
//	bucket                   start an object store; $BUCKET is the --store of a bucket in it
//	registry                 start a registry of container images at $REGISTRY
//	registry private         start Docker's registry instead, which admits only the user builder with the password secret
//	registry hold, registry send  let it send no more blobs; let it send them again
//	image NAME:TAG TEXT      push an image with a shell and /etc/marker, which has TEXT; $NAME_TAG is its reference with a digest, and
//	                         the directory NAME_TAG an OCI layout of it
//	flip TEXT DIGEST         damage two blobs of the current store: TEXT, and the large one of DIGEST
//	commit DIR               make a directory a Git repository with one commit, $COMMIT
//	empty DIR                check that a directory is empty
//	needs WHAT               skip the story where the machine lacks the sandbox, its records of lookups, root or a tool
//
// A line that begins with [full] is for --sandbox full only.
func TestScripts(t *testing.T) {
	tell(t, "full", "testdata/script")
}

// TestSandboxes runs the stories of long-lived sandboxes on other backends.
func TestSandboxes(t *testing.T) {
	for _, backend := range []string{"gvisor", "qemu-tcg"} {
		t.Run(backend, func(t *testing.T) {
			tell(t, backend, "", "testdata/script/sandbox.txtar", "testdata/script/sandbox_ends.txtar", "testdata/script/sandbox_volume.txtar")
		})
	}
}

// tell runs the stories in dir, or in files. The backend is $SANDBOX, and a condition of lines.
func tell(t *testing.T, backend, dir string, files ...string) {
	root := must.Get(filepath.Abs("../.."))(t)
	path := built.Path(t)
	testscript.Run(t, testscript.Params{
		Dir: dir, Files: files,
		Condition: func(name string) (bool, error) { return name == backend, nil },
		Setup: func(env *testscript.Env) error {
			s := &story{TB: env.T().(testing.TB), work: env.WorkDir, nodes: map[string]*node{}, flights: map[string]*flight{}}
			env.Values[storyKey{}] = s
			env.Defer(s.close)
			for name, value := range map[string]string{
				"ROOT": root, "SANDBOX": backend, "ESC": "\x1b", "INSTANCE": "main", "HOME": filepath.Join(env.WorkDir, "home"),
				"PATH": filepath.Dir(path) + ":" + os.Getenv("PATH"),
			} {
				env.Setenv(name, value)
			}
			env.Setenv("RUNSC_PATH", os.Getenv("RUNSC_PATH"))
			env.Setenv("CLOISTER_GUEST_KERNEL", os.Getenv("CLOISTER_GUEST_KERNEL"))
			return os.MkdirAll(filepath.Join(env.WorkDir, "home"), 0o755)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"cloister": command((*story).cloister), "client": command((*story).client), "store": command((*story).store),
			"usage": command((*story).usage), "without": command((*story).without),
			"serve": command((*story).serve), "join": command((*story).join), "use": command((*story).use),
			"end": command((*story).end), "drain": command((*story).drain), "crash": command((*story).crash),
			"waitlog": command((*story).waitlog), "execute": command((*story).execute), "begin": command((*story).begin),
			"running": command((*story).running), "release": command((*story).release),
			"finish": command((*story).finish), "abandon": command((*story).abandon), "gone": command((*story).gone),
			"get": command((*story).get), "health": command((*story).health), "until": command((*story).until),
			"capture": command((*story).capture), "port": command((*story).port),
			"authority": command((*story).authority), "certificate": command((*story).certificate),
			"https": command((*story).https), "trusting": command((*story).trusting),
			"bucket": command((*story).bucket), "registry": command((*story).registry), "image": command((*story).image), "flip": command((*story).flip),
			"commit": command((*story).commit), "empty": command((*story).empty), "needs": command((*story).needs),
			"documented": command((*story).documented),
		},
	})
}

// A story is the state of a running script.
type story struct {
	testing.TB
	script  *testscript.TestScript
	work    string // $WORK
	nodes   map[string]*node
	flights map[string]*flight
	ca      *ca.Authority
	text    string // standard output of a command that is not a program
	// The registry sends blobs while blobs is not locked; sendBlobs unlocks it.
	blobs     sync.RWMutex
	sendBlobs func()
	pushing   []remote.Option // for the registry
}

type storyKey struct{}

// command returns a command of scripts. Its errors end the script.
func command(f func(s *story, args []string) error) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		if neg {
			ts.Fatalf("this command cannot be negated")
		}
		s := ts.Value(storyKey{}).(*story)
		s.script, s.text = ts, ""
		err := f(s, args)
		if s.text != "" {
			fmt.Fprint(ts.Stdout(), s.text)
		}
		ts.Check(err)
	}
}

// patience is how long to wait for something that must happen.
const patience = 3 * time.Minute

// await waits until done returns true.
func await(what string, done func() bool) error {
	if !must.Poll(patience, done) {
		return fmt.Errorf("not within %v: %s", patience, what)
	}
	return nil
}

// exec runs a program and checks its exit code, which is the first argument.
func (s *story) exec(args ...string) error {
	want, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	err = s.script.Exec(args[1], args[2:]...)
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	} else if err != nil {
		return err
	}
	if got != want {
		return fmt.Errorf("got exit code %d, want %d", got, want)
	}
	return nil
}

func (s *story) cloister(args []string) error {
	if err := s.exec(append([]string{args[0], "cloister"}, args[1:]...)...); err != nil {
		return err
	}
	return s.checkJSON(args)
}

func (s *story) client(args []string) error {
	return s.cloister(append(args, "--cas", s.script.Getenv("CAS"), "--instance", s.script.Getenv("INSTANCE")))
}

func (s *story) store(args []string) error {
	return s.cloister(append(args, "--dir", s.script.Getenv("DIR")))
}

func (s *story) usage(args []string) error {
	if err := s.cloister(append([]string{"2"}, args[1:]...)); err != nil {
		return err
	}
	if got := s.script.ReadFile("stdout"); got != "" {
		return fmt.Errorf("got stdout %q, want none", got)
	}
	want := `\Acloister: [^\n]*(?:` + args[0] + `)(?:.*\n){1,3}\z`
	if got := s.script.ReadFile("stderr"); !regexp.MustCompile(want).MatchString(got) {
		return fmt.Errorf("got stderr %q, want at most three lines that match %q", got, want)
	}
	return nil
}

func (s *story) without(args []string) error {
	script := fmt.Sprintf(`echo 0 > /proc/sys/user/max_%s_namespaces || exit 99; exec "$@"`, args[0])
	words := []string{args[1], "unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c", script, "sh"}
	return s.exec(append(words, args[2:]...)...)
}

func (s *story) get(args []string) error {
	text, err := get(args[0])
	s.text = text
	return err
}

// get returns the status and body of a URL without http://, on separate lines.
func get(url string) (string, error) {
	r, err := http.Get("http://" + url)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	return fmt.Sprintf("%d\n%s", r.StatusCode, b), err
}

func (s *story) until(args []string) error {
	want := regexp.MustCompile("(?m)" + args[0])
	look := map[string]func(*story, []string) error{
		"cloister": (*story).cloister, "client": (*story).client, "store": (*story).store,
		"get": (*story).get, "health": (*story).health, "execute": (*story).execute,
	}[args[1]]
	if look == nil {
		return fmt.Errorf("until cannot repeat %s", args[1])
	}
	got, last := "", error(nil)
	err := await(args[0], func() bool {
		s.text = ""
		last = look(s, args[2:])
		if got = s.text; got == "" {
			got = s.script.ReadFile("stdout") + s.script.ReadFile("stderr")
		}
		return last == nil && want.MatchString(got)
	})
	if err != nil {
		return fmt.Errorf("%w: last got %q, %v", err, got, last)
	}
	return nil
}

func (s *story) capture(args []string) error {
	text := s.script.ReadFile("stdout")
	match := regexp.MustCompile("(?m)" + args[1]).FindStringSubmatch(text)
	if match == nil {
		return fmt.Errorf("got stdout %q, want a match of %q", text, args[1])
	}
	s.script.Setenv(args[0], match[1])
	return nil
}

func (s *story) port(args []string) error {
	s.script.Setenv(args[0], unused(s))
	return nil
}

// unused returns an unused address.
func unused(t testing.TB) string {
	t.Helper()
	return must.Get(loopback.Address())(t)
}

func (s *story) empty(args []string) error {
	left, err := os.ReadDir(s.script.MkAbs(args[0]))
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("got %v in %s, want nothing", left, args[0])
	}
	return err
}

func (s *story) commit(args []string) error {
	s.script.Setenv("COMMIT", commit(s, s.script.MkAbs(args[0])))
	return nil
}

func (s *story) needs(args []string) error {
	switch what := args[0]; {
	case what == "sandbox", what == "full":
		confined(s)
	case what == "lookups":
		confined(s)
		err := s.cloister([]string{"2", "run", "--", "getent", "hosts", "a.example.com"})
		if err != nil || !strings.Contains(s.script.ReadFile("stderr"), "lookup of a.example.com") {
			sandboxtest.Unavailable(s, "monitor", "the sandbox records no lookups of names")
		}
	case what == "gvisor":
		if s.cloister([]string{"0", "check", "--sandbox", "gvisor"}) != nil {
			sandboxtest.Unavailable(s, "gvisor", s.script.ReadFile("stderr"))
		}
	case what == "qemu", what == "qemu-tcg":
		if why := guestkernel.Missing(); why != "" {
			sandboxtest.Unavailable(s, "qemu", why)
		}
		if s.cloister([]string{"0", "check", "--sandbox", "qemu-tcg"}) != nil {
			sandboxtest.Unavailable(s, "qemu", s.script.ReadFile("stderr"))
		}
	case what == "cpus":
		if s.cloister([]string{"0", "run", "--quiet", "--cpus", "1", "--", "true"}) != nil {
			sandboxtest.Unavailable(s, "limits", "the number of processors cannot be limited")
		}
	case what == "root" && os.Getuid() != 0:
		sandboxtest.Unavailable(s, "root", "only it may read what another user owns")
	case what == "venv":
		out, err := exec.CommandContext(s.Context(), "/usr/bin/python3", "-c", "import venv").CombinedOutput()
		if err != nil {
			sandboxtest.Unavailable(s, "python", fmt.Sprintf("%v: %s", err, out))
		}
	case what != "root":
		sandboxtest.Tool(s, what)
	}
	return nil
}

func (s *story) authority([]string) error {
	s.ca = ca.New(s, s.work)
	return nil
}

func (s *story) certificate(args []string) error {
	s.ca.Sign(args[0])
	return nil
}

// https serves "hello over TLS" at an address that sandboxes can reach: loopback addresses belong to this host alone.
func (s *story) https(args []string) error {
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return err
	}
	for _, a := range addresses {
		ip := a.(*net.IPNet).IP.To4()
		if ip == nil || ip.IsLoopback() {
			continue
		}
		s.ca.Sign(args[0], ip)
		pair, err := tls.LoadX509KeyPair(s.ca.File(args[0]+".pem"), s.ca.File(args[0]+".key"))
		if err != nil {
			return err
		}
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "hello over TLS\n")
		}))
		if server.Listener, err = net.Listen("tcp", net.JoinHostPort(ip.String(), "0")); err != nil {
			return err
		}
		server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
		server.Config.ErrorLog = log.New(io.Discard, "", 0) // of clients that do not trust it
		server.StartTLS()
		s.Cleanup(server.Close)
		s.script.Setenv(args[0], server.Listener.Addr().String())
		closed, err := net.Listen("tcp", net.JoinHostPort(ip.String(), "0"))
		if err != nil {
			return err
		}
		s.script.Setenv(args[0]+"_closed", closed.Addr().String())
		return closed.Close()
	}
	sandboxtest.Unavailable(s, "address", "this host has only loopback IPv4 addresses")
	return nil
}

func (s *story) trusting(args []string) error {
	const script = `set -e
mount -t tmpfs none /etc/ssl/certs
mount -t tmpfs none /usr/local/share/ca-certificates
install -m 644 "$0" /usr/local/share/ca-certificates/private.crt
ln -s /usr/local/share/ca-certificates/private.crt /etc/ssl/certs/private.pem
install -m 644 "$0" /etc/ssl/certs/ca-certificates.crt
exec "$@"`
	words := []string{args[0], "unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script, s.ca.File("ca.pem")}
	return s.exec(append(words, args[1:]...)...)
}

// logged returns the output of a server or worker so far.
func (s *story) logged(name string) string {
	b, err := os.ReadFile(filepath.Join(s.work, name+".log"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.Fatal(err)
	}
	return string(b)
}

func (s *story) waitlog(args []string) error {
	want := regexp.MustCompile("(?m)" + args[1])
	err := await(args[1], func() bool { return want.MatchString(s.logged(args[0])) })
	if err != nil {
		return fmt.Errorf("%w: got\n%s", err, s.logged(args[0]))
	}
	return nil
}

// close ends what the story has started, workers before their servers.
func (s *story) close() {
	for _, worker := range []bool{true, false} {
		for name, n := range s.nodes {
			if n.Server == nil || worker != (n.config.Join != "") {
				continue
			}
			expect.Error(s, n.end(), nil, "%s", name)
		}
	}
	if s.Failed() {
		for name := range s.nodes {
			s.Logf("output of %s:\n%s", name, strings.TrimSpace(s.logged(name)))
		}
	}
}
