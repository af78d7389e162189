// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/spf13/cobra"
)

// onServer runs f with the server that from names, and gives its error an exit code.
func onServer(ctx context.Context, from *origin, f func(ctx context.Context, s *remote.Store) error) error {
	ctx, end := stop(ctx)
	defer end()
	s, err := from.open(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := f(ctx, s); err != nil {
		if ctx.Err() != nil {
			return stopped(ctx, err, "stopped")
		}
		return from.explain(err, exitNo)
	}
	return nil
}

// parseDigests returns the digests that the command line names.
func parseDigests(args []string) ([]cas.Digest, error) {
	ds := make([]cas.Digest, len(args))
	for i, arg := range args {
		var err error
		if ds[i], err = cas.ParseDigest(arg); err != nil {
			return nil, err
		}
	}
	return ds, nil
}

func casPutCommand() *cobra.Command {
	var to origin
	var name string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "put PATH... [--cas URL] [--instance NAME] [--digest-function FUNCTION] [--json]",
		Short: "Uploads files and directories, and prints their digests",
		Long: `Put uploads each PATH to the store of a server, and prints its digest and the path. Of a directory that is
the digest of the Directory message that an action names as its input root; everything in it is uploaded, symlinks
as they are. The path - is the standard input. What is present already is not sent again.`,
		Example: `  cloister cas put main.c
  cloister cas put src --digest-function blake3
  echo hello | cloister cas put - --cas grpcs://cache.example.com:443`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			function, err := cas.ParseFunction(name)
			if err != nil {
				return fmt.Errorf("--digest-function: %w", err)
			}
			for _, arg := range args {
				if _, err := os.Stat(arg); err != nil && arg != "-" {
					return fmt.Errorf("%s: %w", arg, errors.Unwrap(err))
				}
			}
			var rows []uploaded
			err = onServer(cmd.Context(), &to, func(ctx context.Context, s *remote.Store) error {
				for _, arg := range args {
					d, err := upload(ctx, s, function, arg, cmd.InOrStdin())
					if err != nil {
						return fmt.Errorf("%s: %w", arg, err)
					}
					rows = append(rows, uploaded{d.String(), arg})
					if asJSON {
						continue
					}
					if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%s  %s\n", d, arg); err != nil {
						return err
					}
				}
				return nil
			})
			if err == nil && asJSON {
				err = printJSON(cmd.OutOrStdout(), rows)
			}
			return err
		},
	}
	to.register(cmd)
	cmd.Flags().StringVar(&name, "digest-function", cas.SHA256.String(), "function of the digests")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON list")
	return cmd
}

// An uploaded is what put prints of a path.
type uploaded struct {
	Digest string `json:"digest"`
	Path   string `json:"path"`
}

// upload stores what path names.
func upload(ctx context.Context, to cas.Store, f cas.Function, path string, stdin io.Reader) (cas.Digest, error) {
	if path == "-" {
		return uploadStream(ctx, to, f, stdin)
	}
	switch fi, err := os.Stat(path); { // before it is opened: a pipe would wait for its writer
	case err != nil:
		return cas.Digest{}, err
	case fi.IsDir():
		dir, err := os.OpenRoot(path)
		if err != nil {
			return cas.Digest{}, err
		}
		defer dir.Close()
		return tree.Ingest(ctx, to, f, dir)
	case !fi.Mode().IsRegular():
		return cas.Digest{}, errors.New("it is neither a file nor a directory; pipe it into: cloister cas put -")
	}
	file, err := os.Open(path)
	if err != nil {
		return cas.Digest{}, err
	}
	defer file.Close()
	return uploadFile(ctx, to, f, file)
}

// uploadFile stores a file, unless the store has it.
func uploadFile(ctx context.Context, to cas.Store, f cas.Function, file *os.File) (cas.Digest, error) {
	d, err := f.SumSeeker(file)
	if err != nil {
		return d, err
	}
	missing, err := to.Missing(ctx, []cas.Digest{d})
	if err != nil || len(missing) == 0 {
		return d, err
	}
	return d, to.Put(ctx, d, file)
}

// uploadStream stores what r holds, by way of a file: the name of a blob comes before its bytes.
func uploadStream(ctx context.Context, to cas.Store, f cas.Function, r io.Reader) (cas.Digest, error) {
	file, err := os.CreateTemp("", "cloister-put-*")
	if err != nil {
		return cas.Digest{}, err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := io.Copy(file, r); err != nil {
		return cas.Digest{}, err
	}
	return uploadFile(ctx, to, f, file)
}

func casGetCommand() *cobra.Command {
	var from origin
	var directory, message bool
	cmd := &cobra.Command{
		Use:   "get DIGEST PATH [--cas URL] [--instance NAME] [--directory | --tree]",
		Short: "Downloads a blob, or a directory with all that is in it",
		Long: `Get writes a blob to the file PATH, which exists once all of it has arrived and is what the digest says. With
--directory DIGEST is that of a Directory message, such as an input root, and with --tree that of a Tree message, as
results name output directories: what is in it is written below the directory PATH.

It exits with 4 if something is absent, and with 5 if the server cannot be reached.`,
		Example: `  cloister cas get 9f2c...e1/142 action.bin
  cloister cas get 77ab...02/310 inputs --directory`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := cas.ParseDigest(args[0])
			if err != nil {
				return err
			}
			return onServer(cmd.Context(), &from, func(ctx context.Context, s *remote.Store) error {
				if directory || message {
					return downloadDirectory(ctx, s, d, message, args[1])
				}
				return download(ctx, s, d, args[1])
			})
		},
	}
	from.register(cmd)
	registerForms(cmd, &directory, &message)
	return cmd
}

// registerForms adds the flags that say what message a digest names.
func registerForms(cmd *cobra.Command, directory, message *bool) {
	if directory != nil {
		cmd.Flags().BoolVar(directory, "directory", false, "DIGEST is that of a Directory message")
	}
	cmd.Flags().BoolVar(message, "tree", false, "DIGEST is that of a Tree message, as results name output directories")
	if directory != nil {
		cmd.MarkFlagsMutuallyExclusive("directory", "tree")
	}
}

// download writes a blob to path, by a rename.
func download(ctx context.Context, from cas.Store, d cas.Digest, path string) error {
	r, err := from.Open(ctx, d, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	_, err = io.Copy(file, r)
	if err == nil {
		err = file.Chmod(0o644)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

// downloadDirectory writes what is in a directory below path. Message says that d names a Tree.
func downloadDirectory(ctx context.Context, from cas.Store, d cas.Digest, message bool, path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	dir, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	o := &repb.OutputDirectory{RootDirectoryDigest: d.Proto()}
	if message {
		o = &repb.OutputDirectory{TreeDigest: d.Proto()}
	}
	return tree.Extract(ctx, from, d.Function(), &repb.ActionResult{OutputDirectories: []*repb.OutputDirectory{o}}, dir)
}

func casCatCommand() *cobra.Command {
	var from origin
	cmd := &cobra.Command{
		Use:   "cat DIGEST... [--cas URL] [--instance NAME]",
		Short: "Prints blobs as they are",
		Long: `Cat writes blobs to the standard output, one after the other. What turns out not to be what its digest says has
been written by then; the exit code tells.

It exits with 4 if a blob is absent, and with 5 if the server cannot be reached.`,
		Example: `  cloister cas cat 9f2c...e1/142
  cloister cas cat blake3:77ab...02/310 | sha256sum`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ds, err := parseDigests(args)
			if err != nil {
				return err
			}
			return onServer(cmd.Context(), &from, func(ctx context.Context, s *remote.Store) error {
				for _, d := range ds {
					r, err := s.Open(ctx, d, 0)
					if err != nil {
						return err
					}
					_, err = io.Copy(cmd.OutOrStdout(), r)
					if err = errors.Join(err, r.Close()); err != nil {
						return fmt.Errorf("blob %s: %w", d, err)
					}
				}
				return nil
			})
		},
	}
	from.register(cmd)
	return cmd
}

// A present is what stat and verify print of a blob.
type present struct {
	Digest string `json:"digest"`
	State  string `json:"state"` // present, absent, sound, damaged
}

// casPresent asks a server for blobs, and, if it is to read them, whether they are what their digests say.
func casPresent(ctx context.Context, from *origin, args []string, read, asJSON bool, out io.Writer) error {
	ds, err := parseDigests(args)
	if err != nil {
		return err
	}
	code := 0
	var rows []present
	err = onServer(ctx, from, func(ctx context.Context, s *remote.Store) error {
		missing, err := s.Missing(ctx, ds)
		if err != nil {
			return err
		}
		for _, d := range ds {
			state := "present"
			if slices.Contains(missing, d) {
				state, code = "absent", max(code, exitAbsent)
			} else if read {
				state = "sound"
				switch err := readThrough(ctx, s, d); {
				case errors.Is(err, cas.ErrCorrupt):
					state, code = "damaged", max(code, exitNo)
				case errors.Is(err, cas.ErrNotFound): // as a server calls it whose store has dropped what it found damaged
					state, code = "damaged or gone", max(code, exitAbsent)
				case err != nil:
					return err
				}
			}
			rows = append(rows, present{d.String(), state})
			if asJSON {
				continue
			}
			if _, err := fmt.Fprintf(out, "%-8s %10s  %s\n", state, sandbox.Bytes(d.Size()), d); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && asJSON {
		err = printJSON(out, rows)
	}
	if err == nil && code != 0 {
		err = newExit(code, nil)
	}
	return err
}

// readThrough reads a blob to its end.
func readThrough(ctx context.Context, from cas.Store, d cas.Digest) error {
	r, err := from.Open(ctx, d, 0)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, r)
	return errors.Join(err, r.Close())
}
