// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox/policy/strict"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// A File is the text of a configuration file.
type File struct {
	name string
	text []byte
	info os.FileInfo // nil for standard input
}

// limit is more than package strict accepts.
const limit = 1 << 20

// stdin can be read once, but config show needs it for several commands.
var stdin = sync.OnceValues(func() ([]byte, error) { return io.ReadAll(io.LimitReader(os.Stdin, limit)) })

// Open reads a file, or standard input if the name is -. If the name is empty it reads DefaultFile, or returns nil if
// that does not exist.
func Open(name string) (*File, error) {
	if name == "-" {
		text, err := stdin()
		return &File{name: "stdin", text: text}, err
	}
	path := name
	if name == "" {
		path = DefaultFile
	}
	r, err := os.Open(path)
	if name == "" && errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	defer r.Close()
	f := &File{name: path}
	if f.info, err = r.Stat(); err == nil {
		f.text, err = io.ReadAll(io.LimitReader(r, limit))
	}
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	return f, nil
}

// Apply sets the flags of cmd that are not set yet. It checks the names of all keys, and the values of those of cmd.
func (f *File) Apply(cmd *cobra.Command) error {
	r := &reader{strict.NewDecoder(f.name, "a configuration", f.text), map[string]setting{}, map[string]setting{}}
	root, err := r.Parse(f.text)
	if err != nil {
		return err
	}
	if err := r.read(root, cmd); err != nil {
		return err
	}
	maps.Copy(r.common, r.own)
	return apply(cmd, r.common)
}

// A reader collects the settings of a file for one command.
type reader struct {
	*strict.Decoder
	common, own map[string]setting // outside of sections, and in the section of the command
}

// read reads the file: keys that apply to every command with that flag, and a section for each command.
func (r *reader) read(root *strict.Node, cmd *cobra.Command) error {
	sections := map[string]*cobra.Command{}
	known := map[string]bool{"version": true}
	for _, c := range Commands(cmd.Root()) {
		sections[c.Name()], known[c.Name()] = c, true
		maps.Copy(known, keys(c))
	}
	version := false
	err := r.Entries(root, func(name string, key, value *strict.Node) error {
		if c := sections[name]; c != nil {
			return r.section(value, c, c == cmd)
		}
		switch {
		case name == "version":
			version = true
			if v, err := r.Scalar(value); err != nil || v != "1" {
				return r.Errorf(value, "this version of Cloister reads version 1")
			}
			return nil
		case !known[name]:
			return r.unknown(key, name, known)
		case !keys(cmd)[name]:
			return nil // another command's
		}
		return r.setting(r.common, cmd.Flags().Lookup(name), value)
	})
	if err == nil && !version {
		err = r.Errorf(root, "missing version: write version: 1")
	}
	return err
}

// section reads the keys of one command, which it only checks unless they are wanted.
func (r *reader) section(n *strict.Node, cmd *cobra.Command, wanted bool) error {
	known := keys(cmd)
	return r.Entries(n, func(name string, key, value *strict.Node) error {
		switch {
		case !known[name]:
			return r.unknown(key, name, known)
		case !wanted:
			return nil
		}
		return r.setting(r.own, cmd.Flags().Lookup(name), value)
	})
}

// keys returns the keys of a command.
func keys(cmd *cobra.Command) map[string]bool {
	known := map[string]bool{}
	each(cmd, func(f *pflag.Flag) { known[f.Name] = f.Name != "config" })
	delete(known, "config")
	return known
}

// unknown returns the error for an unknown key. The list of all keys would be too long.
func (r *reader) unknown(key *strict.Node, name string, known map[string]bool) error {
	names := slices.Sorted(maps.Keys(known))
	if strict.Nearest(name, names) == "" {
		return r.Errorf(key, "unknown key %q: write the name of a flag of cloister serve, join or runner", name)
	}
	return r.Unknown(key, "key", name, names)
}

// setting reads the value of a flag: a scalar, and for a repeatable flag also a list, or a mapping of NAME=VALUE.
func (r *reader) setting(into map[string]setting, f *pflag.Flag, n *strict.Node) error {
	var values []string
	var nodes []*strict.Node
	add := func(prefix string, n *strict.Node) error {
		text, err := r.Scalar(n)
		values, nodes = append(values, prefix+text), append(nodes, n)
		return err
	}
	list := func(prefix string, n *strict.Node) error {
		if !n.IsSequence() {
			return add(prefix, n)
		}
		return r.Sequence(n, func(element *strict.Node) error { return add(prefix, element) })
	}
	var err error
	switch {
	case !flags.IsRepeatable(f):
		err = add("", n)
	case n.IsMapping():
		err = r.Entries(n, func(name string, _, value *strict.Node) error { return list(name+"=", value) })
	default:
		err = list("", n)
	}
	if err == nil && len(values) == 0 {
		err = r.Errorf(n, "--%s is empty: write a value or omit the key", f.Name)
	}
	into[f.Name] = setting{r.At(n), values, func(i int, err error) error { return r.Errorf(nodes[i], "%v", err) }}
	return err
}

// watchInterval is the interval of checks for changes.
const watchInterval = 10 * time.Second

// watch logs the name of the file, and warns once if the file changes. stop ends the watch.
func (f *File) watch() (stop func()) {
	if f == nil {
		return func() {}
	}
	slog.Info("read the configuration", "file", f.name)
	if runtime.GOOS != "windows" && f.info != nil && f.info.Mode().IsRegular() && f.info.Mode()&0o002 != 0 {
		slog.Warn("everybody on this host can change the configuration: chmod o-w", "file", f.name)
	}
	done := make(chan struct{})
	go func() {
		tick := time.NewTicker(watchInterval)
		defer tick.Stop()
		for f.unchanged() {
			select {
			case <-done:
				return
			case <-tick.C:
			}
		}
		slog.Warn("the configuration has changed: restart to apply it", "file", f.name)
	}()
	return func() { close(done) }
}

// unchanged reports whether the file is still the one that was read.
func (f *File) unchanged() bool {
	if f.info == nil {
		return true
	}
	now, err := os.Stat(f.name)
	return err == nil && now.ModTime().Equal(f.info.ModTime()) && now.Size() == f.info.Size()
}
