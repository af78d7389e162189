// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/archive"
	"github.com/cloister-build/cloister/cmd/cloister/internal/environments"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/spf13/cobra"
)

func sandboxCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "sandbox",
		Short: "Create sandboxes that outlive a command, and use them",
		Long: `A sandbox keeps the files and processes of its commands until it ends. The root file system is read-only; the working
directory and /tmp are writable, in memory. It has no network except loopback and the endpoints of --allow.

There is no daemon: each sandbox has its own supervisor process, which ends it after --idle-timeout or --lifetime. If
the supervisor is killed, the sandbox ends with it, and the next sandbox command removes its remains.`,
		Example: `  cloister sandbox create --name dev --image docker.io/library/gcc:14 --memory 2GiB
  cloister sandbox exec dev -- gcc --version
  cloister sandbox rm dev`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(sandboxCreateCommand(), sandboxExecCommand(), sandboxCpCommand(),
		sandboxLsCommand(), sandboxLogsCommand(), sandboxStopCommand(), sandboxRmCommand(),
		sandboxPackCommand(), sandboxUnpackCommand())
	return cmd
}

// completeSandbox completes the name of a sandbox as the first argument, and returns rest for later arguments.
func completeSandbox(rest cobra.ShellCompDirective) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, rest
		}
		return environments.Names(typed), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeSandboxes completes the names of sandboxes that are not among the arguments yet.
func completeSandboxes(_ *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
	names := slices.DeleteFunc(environments.Names(typed), func(name string) bool { return slices.Contains(args, name) })
	return names, cobra.ShellCompDirectiveNoFileComp
}

func sandboxCreateCommand() *cobra.Command {
	var c environments.Config
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "create [--name NAME] [--image IMAGE] [--in DIR] [--env K=V]... [--idle-timeout TIME] [--lifetime TIME] [--json]",
		Short: "Create a sandbox",
		Long: `Create makes a sandbox and prints its name once it is ready. Its commands see the files of --in or --git in the working
directory, read-only, and the root file system of --image, --root or the host's toolchain. They can create files in the
working directory and in /tmp. The limits apply to all commands together.

The environment contains only PATH, HOME, TMPDIR and the variables of --env and --pass-env.`,
		Example: `  cloister sandbox create --name dev --in . --pass-env LANG --idle-timeout 10m
  cloister sandbox create --image docker.io/library/python:3.13 --allow pypi.org:443 --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.Check(); err != nil {
				return err
			}
			ctx, cancel := interrupt.Context(cmd.Context())
			defer cancel()
			s, err := environments.Create(ctx, &c)
			switch {
			case err != nil:
				return interrupt.Explain(ctx, err, "stopped")
			case s == nil: // this was the supervisor
				return nil
			}
			if asJSON {
				return render.JSON(cmd.OutOrStdout(), s)
			}
			fmt.Fprintln(cmd.OutOrStdout(), s.Name)
			return nil
		},
	}
	c.Register(cmd)
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON object", environments.State{})
	return cmd
}

func sandboxExecCommand() *cobra.Command {
	var c environments.Command
	var interactive, asJSON bool
	var env, passEnv []string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: "exec [-it] [--env K=V]... [--workdir DIR] [--timeout TIME] [--json] NAME -- COMMAND [ARG]...\n" +
			"  cloister sandbox exec --session NAME -- SCRIPT [ARG]...",
		Short: "Execute a command in a sandbox",
		Long: `Exec executes a command in a running sandbox. Files and background processes remain for later commands; the working
directory and changed variables do not, except with --session. Piped stdin and signals are passed on. If this process is
killed, the command is terminated.

With --session, SCRIPT is a script for bash, or sh if there is none. It begins with the working directory and exported
variables with which the last one ended. One that is killed, replaces itself or sets a trap on EXIT leaves none.

The exit code is that of the command; 128+N after signal N; 127 if the program was not found and 126 if it cannot be
executed; 4 if the sandbox does not exist, 5 if it has ended, 6 after --timeout, and 125 if Cloister failed.`,
		Example: `  cloister sandbox exec dev -- make test
  cloister sandbox exec --session dev -- 'cd src && export CC=clang'
  cloister sandbox exec -it dev -- bash`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeSandbox(cobra.ShellCompDirectiveDefault),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.ArgsLenAtDash() != 1 || len(args) < 2 {
				return errors.New("write the name of a sandbox and, after --, a command")
			}
			switch {
			case timeout < 0:
				return fmt.Errorf("--timeout %v: write a positive time", timeout)
			case asJSON && c.TTY:
				return errors.New("--json needs the output, which --tty connects to this terminal: pass one of them")
			case c.Session && c.Dir != "":
				return errors.New("--session begins in the directory in which the last script ended: omit --workdir and write cd in the script")
			}
			var err error
			if c.Env, err = localworker.SandboxVariables(env, passEnv); err != nil {
				return err
			}
			ctx := cmd.Context()
			if timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout)
				defer cancel()
			}
			c.Args, c.Stdout, c.Stderr = args[1:], os.Stdout, os.Stderr
			if c.TTY {
				if term := os.Getenv("TERM"); term != "" && !slices.ContainsFunc(c.Env, func(kv string) bool { return strings.HasPrefix(kv, "TERM=") }) {
					c.Env = append(c.Env, "TERM="+term)
				}
			} else if fi, err := os.Stdin.Stat(); interactive || err == nil && fi.Mode()&os.ModeCharDevice == 0 {
				c.Stdin = os.Stdin
			}
			interrupt.IgnoreBrokenPipe()
			var code int
			if asJSON {
				ran, err := environments.Capture(ctx, args[0], &c)
				if err != nil {
					return err
				}
				if err := render.JSON(cmd.OutOrStdout(), ran); err != nil {
					return err
				}
				code = ran.ExitCode
			} else if code, err = environments.Exec(ctx, args[0], &c); err != nil {
				return err
			}
			if code != 0 {
				return exit.New(code, nil)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.BoolVar(&c.Session, "session", false, "run a shell script that continues the session of the last one")
	f.DurationVar(&timeout, "timeout", 0, "time limit of the command (default: none)")
	render.JSONFlag(f, &asJSON, "print a JSON object with the output", environments.Ran{})
	f.BoolVarP(&interactive, "interactive", "i", false, "pass on stdin even if it is a terminal")
	f.BoolVarP(&c.TTY, "tty", "t", false, "pseudo-terminal for the command, connected to this terminal")
	f.StringArrayVar(&env, "env", nil, "environment variable, KEY=VALUE; repeatable")
	f.StringArrayVar(&passEnv, "pass-env", nil, "name of an environment variable to pass on; repeatable")
	f.StringVar(&c.Dir, "workdir", "", "working directory (default: that of the sandbox)")
	return cmd
}

func sandboxCpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files into a sandbox or out of one",
		Long: `Cp copies a file or directory. One of the two is NAME:PATH, in a sandbox, where PATH is absolute or relative to the
working directory. If the destination is a directory, the copy is made in it. Files are replaced, directories are merged,
and permissions and symbolic links are kept. Inputs of the sandbox and its root file system cannot be changed.`,
		Example: `  cloister sandbox cp src dev:
  cloister sandbox cp dev:result.txt .`,
		Args: cobra.ExactArgs(2),
		ValidArgsFunction: func(_ *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
			var names []cobra.Completion
			for _, name := range environments.Names(typed) {
				names = append(names, name+":")
			}
			return names, cobra.ShellCompDirectiveNoSpace
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			interrupt.IgnoreBrokenPipe()
			return environments.Copy(cmd.Context(), args[0], args[1])
		},
	}
}

// sandboxPackCommand is the sandbox's end of a copy out of it.
func sandboxPackCommand() *cobra.Command {
	return &cobra.Command{
		Use: environments.PackCommand + " PATH", Hidden: true, Args: cobra.ExactArgs(1),
		Short:   "Write an archive for sandbox cp",
		Example: "  cloister sandbox cp dev:result.txt .",
		RunE: func(cmd *cobra.Command, args []string) error {
			return exitNo(archive.Pack(cmd.OutOrStdout(), args[0]))
		},
	}
}

// sandboxUnpackCommand is the sandbox's end of a copy into it.
func sandboxUnpackCommand() *cobra.Command {
	return &cobra.Command{
		Use: environments.UnpackCommand + " PATH NAME", Hidden: true, Args: cobra.ExactArgs(2),
		Short:   "Read an archive of sandbox cp",
		Example: "  cloister sandbox cp src dev:",
		RunE: func(cmd *cobra.Command, args []string) error {
			return exitNo(archive.Unpack(cmd.InOrStdin(), args[0], args[1]))
		},
	}
}

func exitNo(err error) error {
	if err == nil {
		return nil
	}
	return exit.New(exit.No, err)
}

func sandboxLsCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls [--json]",
		Short:   "List sandboxes",
		Long:    `Ls prints the sandboxes of this user: running ones with their remaining lifetime, others with the reason why they ended.`,
		Example: `  cloister sandbox ls --json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			list, err := environments.List()
			switch {
			case err != nil && len(list) == 0:
			case asJSON:
				err = errors.Join(render.JSON(cmd.OutOrStdout(), list), err)
			case len(list) == 0:
				fmt.Fprintln(unlessQuiet(cmd, cmd.ErrOrStderr()), "there are no sandboxes")
			default:
				err = errors.Join(printSandboxes(cmd.OutOrStdout(), list), err)
			}
			return err
		},
	}
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON list", []environments.State{})
	return cmd
}

func printSandboxes(out io.Writer, list []environments.State) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "name\tage\tstate\troot")
	for _, s := range list {
		state := "ended: " + s.Reason
		if s.Running {
			state = "running, at most " + render.Age(time.Until(s.Expires).Seconds())
		}
		root := s.Root
		if root == "" {
			root = "host toolchain"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", s.Name, render.Age(time.Since(s.Created).Seconds()), strings.TrimSpace(state), printable.Text(root))
	}
	return w.Flush()
}

func sandboxLogsCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "logs NAME [--json]",
		Short: "Print the log of a sandbox",
		Long: `Logs prints a line for the creation of the sandbox, for each command with its exit code, and for its end. What the
sandbox denied follows when it has ended. The output of commands is not logged.`,
		Example:           `  cloister sandbox logs dev`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeSandbox(cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, args []string) error {
			lines, err := environments.Logs(args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return render.JSON(cmd.OutOrStdout(), lines)
			}
			for _, l := range lines {
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%s  %s\n", l.Time.Format(time.RFC3339), l.Text); err != nil {
					return err
				}
			}
			return nil
		},
	}
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON list", []environments.LogLine{})
	return cmd
}

func sandboxStopCommand() *cobra.Command {
	return endingCommand(environments.Stop, &cobra.Command{
		Use:   "stop NAME... [--json]",
		Short: "End sandboxes and keep their logs",
		Long: `Stop ends the commands of a sandbox, with SIGTERM and after three seconds with SIGKILL. Its files are in memory and are
lost; the log remains until cloister sandbox rm. It does nothing to a sandbox that has ended.`,
		Example: `  cloister sandbox stop dev`,
	})
}

func sandboxRmCommand() *cobra.Command {
	return endingCommand(environments.Remove, &cobra.Command{
		Use:     "rm NAME... [--json]",
		Short:   "End sandboxes and remove them",
		Long:    `Rm stops a sandbox and removes its log.`,
		Example: `  cloister sandbox rm dev`,
	})
}

// endingCommand makes cmd the command that ends sandboxes.
func endingCommand(end func(context.Context, string) (*environments.State, error), cmd *cobra.Command) *cobra.Command {
	var asJSON bool
	cmd.Args, cmd.ValidArgsFunction = cobra.MinimumNArgs(1), completeSandboxes
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ended := []*environments.State{}
		var failed error
		for _, name := range args {
			s, err := end(cmd.Context(), name)
			if failed = err; failed != nil {
				break
			}
			ended = append(ended, s)
		}
		if asJSON && len(ended) > 0 {
			failed = errors.Join(failed, render.JSON(cmd.OutOrStdout(), ended))
		}
		return failed
	}
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON list of their last states", []environments.State{})
	return cmd
}
