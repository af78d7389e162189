// SPDX-License-Identifier: Apache-2.0

// Command probe is the command of the actions in tests/reapi. It examines its environment on any server and reports
// what it finds; the tests evaluate it. It is static and needs no shell, no libraries and, as far as possible, no
// /proc.
//
// Each argument is a step: a word and its operands, separated by single spaces; the last operand is the rest of the
// argument. The steps run in order. A failing step ends the probe with exit code 99 and a line on stderr.
package main

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// stepFailed is the exit code for a failed step.
const stepFailed = 99

func main() {
	// Before anything is opened.
	start := initialState()
	for _, arg := range os.Args[1:] {
		word, rest, _ := strings.Cut(arg, " ")
		if err := do(start, word, rest); err != nil {
			fmt.Fprintf(os.Stderr, "probe: %s: %v\n", arg, err)
			os.Exit(stepFailed)
		}
	}
}

// A step is the implementation of a word.
type step struct {
	operands int
	do       func(o []string) error
}

var steps = map[string]step{
	// Output, with bytes in hexadecimal.
	"say":    {1, func(o []string) error { return say(os.Stdout, o[0]+"\n") }},
	"bytes":  {1, func(o []string) error { return sayHex(os.Stdout, o[0]) }},
	"ebytes": {1, func(o []string) error { return sayHex(os.Stderr, o[0]) }},
	"repeat": {2, repeat}, // N TEXT

	// Files.
	"cat":     {1, func(o []string) error { b, err := os.ReadFile(o[0]); os.Stdout.Write(b); return err }},
	"copy":    {2, copyFile},
	"write":   {2, func(o []string) error { return os.WriteFile(o[0], []byte(o[1]), 0o644) }},
	"append":  {2, appendTo},
	"random":  {2, random}, // BYTES PATH
	"mkdir":   {1, func(o []string) error { return os.Mkdir(o[0], 0o755) }},
	"mkdirs":  {1, func(o []string) error { return os.MkdirAll(o[0], 0o755) }},
	"rename":  {2, func(o []string) error { return os.Rename(o[0], o[1]) }},
	"remove":  {1, func(o []string) error { return os.Remove(o[0]) }},
	"symlink": {2, func(o []string) error { return os.Symlink(o[0], o[1]) }},
	"chmod":   {2, chmod}, // MODE PATH
	"fifo":    {1, func(o []string) error { return syscall.Mkfifo(o[0], 0o644) }},
	"socket":  {1, socket},
	"odd":     {1, func(o []string) error { return os.WriteFile(o[0]+"/\xff", nil, 0o644) }},
	"files":   {2, files},   // N DIR
	"absent":  {1, absent},  // fails if there is something
	"spoil":   {1, spoil},   // prints changed or kept
	"tree":    {1, tree},    // one JSON line for each entry below
	"exists":  {1, exists},  // prints yes or no
	"write?":  {1, mayFail}, // creates a file and prints made or refused

	// Processes and resources.
	"exit":   {1, exit},
	"kill":   {1, killSelf}, // signal number
	"sleep":  {1, sleep},    // a duration
	"clock":  {0, clock},    // prints the time in nanoseconds since 1970
	"onterm": {1, onTerm},   // TEXT: printed on SIGTERM, after which the probe continues
	"daemon": {2, daemon},   // DURATION DIR: an orphan in its own session that writes into DIR
	"orphan": {2, orphan},
	"linger": {2, linger},
	"memory": {1, allocate}, // bytes to allocate and touch

	// Network.
	"dial": {1, dial}, // HOST:PORT
	"call": {3, call}, // SOCKET METHOD MESSAGE, the message in hexadecimal; prints the status
}

func do(start state, word, rest string) error {
	if word == "report" {
		return report(start)
	}
	s, ok := steps[word]
	if !ok {
		return errors.New("unknown step")
	}
	var operands []string
	if s.operands > 0 {
		operands = strings.SplitN(rest, " ", s.operands)
	}
	if len(operands) != s.operands {
		return fmt.Errorf("got %d operands, want %d", len(operands), s.operands)
	}
	return s.do(operands)
}

func say(to *os.File, text string) error {
	_, err := to.WriteString(text)
	return err
}

func sayHex(to *os.File, text string) error {
	b, err := hex.DecodeString(text)
	if err != nil {
		return err
	}
	_, err = to.Write(b)
	return err
}

func repeat(o []string) error {
	n, err := strconv.Atoi(o[0])
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(os.Stdout, 1<<20)
	for range n {
		w.WriteString(o[1])
	}
	return w.Flush()
}

func appendTo(o []string) error {
	f, err := os.OpenFile(o[0], os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(o[1])
	return errors.Join(err, f.Close())
}

func copyFile(o []string) error {
	from, err := os.Open(o[0])
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.Create(o[1])
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Close())
}

func random(o []string) error {
	n, err := strconv.ParseInt(o[0], 10, 64)
	if err != nil {
		return err
	}
	f, err := os.Create(o[1])
	if err != nil {
		return err
	}
	_, err = io.CopyN(f, rand.Reader, n)
	return errors.Join(err, f.Close())
}

func chmod(o []string) error {
	mode, err := strconv.ParseUint(o[0], 8, 32)
	if err != nil {
		return err
	}
	return os.Chmod(o[1], fs.FileMode(mode))
}

func socket(o []string) error {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: o[0]})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	return l.Close()
}

func files(o []string) error {
	n, err := strconv.Atoi(o[0])
	if err != nil {
		return err
	}
	for i := range n {
		if err := os.WriteFile(filepath.Join(o[1], strconv.Itoa(i)), []byte(strconv.Itoa(i)), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func absent(o []string) error {
	if fi, err := os.Lstat(o[0]); err == nil {
		return fmt.Errorf("exists: %v", fi.Mode())
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func exists(o []string) error {
	if _, err := os.Lstat(o[0]); err != nil {
		return say(os.Stdout, "no\n")
	}
	return say(os.Stdout, "yes\n")
}

// spoil tries to change the mode, the contents and the length of an input.
func spoil(o []string) error {
	outcome := "kept"
	_ = os.Chmod(o[0], 0o777) // the steps below show whether it succeeded
	if f, err := os.OpenFile(o[0], os.O_RDWR, 0); err == nil {
		if _, err := f.WriteAt([]byte("spoilt"), 0); err == nil {
			outcome = "changed"
		}
		f.Close()
	}
	if err := os.Truncate(o[0], 1); err == nil {
		outcome = "changed"
	}
	return say(os.Stdout, outcome+"\n")
}

func mayFail(o []string) error {
	if err := os.WriteFile(o[0], nil, 0o644); err != nil {
		return say(os.Stdout, "refused\n")
	}
	return say(os.Stdout, "made\n")
}

func exit(o []string) error {
	n, err := strconv.Atoi(o[0])
	if err == nil {
		os.Exit(n)
	}
	return err
}

// killSelf ends the probe by a signal that Go does not handle as a crash.
func killSelf(o []string) error {
	n, err := strconv.Atoi(o[0])
	if err != nil {
		return err
	}
	signal.Reset(syscall.Signal(n))
	if err := syscall.Kill(os.Getpid(), syscall.Signal(n)); err != nil {
		return err
	}
	time.Sleep(10 * time.Second)
	return fmt.Errorf("alive after signal %d", n)
}

func sleep(o []string) error {
	d, err := time.ParseDuration(o[0])
	time.Sleep(d)
	return err
}

func clock([]string) error { return say(os.Stdout, strconv.FormatInt(time.Now().UnixNano(), 10)+"\n") }

func onTerm(o []string) error {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM)
	go func() {
		<-c
		fmt.Println(o[0])
	}()
	return nil
}

// daemon starts an orphan in its own session, which outlives the probe unless it is killed, and returns when the orphan
// has written a file. The orphan keeps stdout open, which must not delay the end of the action.
func daemon(o []string) error {
	if err := self("orphan", o).Run(); err != nil {
		return err
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		_, err := os.Stat(filepath.Join(o[1], "0"))
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

func orphan(o []string) error { return self("linger", o).Start() }

// linger ignores signals and writes into the directory o[1] for the time o[0].
func linger(o []string) error {
	d, err := time.ParseDuration(o[0])
	if err != nil {
		return err
	}
	signal.Ignore(syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE)
	for i, end := 0, time.Now().Add(d); time.Now().Before(end); i++ {
		// Ignore errors: the directory may be gone.
		_ = os.WriteFile(filepath.Join(o[1], strconv.Itoa(i)), []byte("late"), 0o644)
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}

// self returns a command that runs one step of the probe in its own session.
func self(word string, o []string) *exec.Cmd {
	name, err := os.Executable()
	if err != nil { // without /proc
		name = os.Args[0]
	}
	cmd := exec.Command(name, word+" "+strings.Join(o, " "))
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

func allocate(o []string) error {
	n, err := strconv.ParseInt(o[0], 10, 64)
	if err != nil {
		return err
	}
	const piece = 1 << 20
	var all [][]byte
	for range n / piece {
		p := make([]byte, piece)
		for i := 0; i < len(p); i += 4096 {
			p[i] = 1
		}
		all = append(all, p)
	}
	fmt.Println(len(all))
	runtime.KeepAlive(all)
	return nil
}

func dial(o []string) error {
	c, err := net.DialTimeout("tcp", o[0], 3*time.Second)
	if err != nil {
		return say(os.Stdout, "unreachable\n")
	}
	c.Close()
	return say(os.Stdout, "reached\n")
}
