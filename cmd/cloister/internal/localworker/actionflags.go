// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/revision"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/cmd/cloister/internal/images"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
)

// ActionFlags describe an action made from a command and files of this host.
type ActionFlags struct {
	in         string
	root       string
	image      string
	git        string
	submodules string
	Out        []string
	env        []string
	passEnv    []string
	property   []string
	Timeout    time.Duration
	seed       string
	limits     [len(limitFlags)]string
	allow      []string
	Args       []string
	Program    string // a static program of this host, in ProgramDir among the inputs; "" for none
	Lasting    bool   // the variables are those of a sandbox that outlives a command

	onViolation string

	// Set by Check.
	Endpoints       []sandbox.Endpoint // --allow
	repository, rev string
	number          *uint64       // --seed, nil without one
	container       images.Source // --image, zero without one
	variables       []*repb.Command_EnvironmentVariable
	platform        *repb.Platform // nil without properties
}

// ActionFlagNames are the names of the flags. A stored action states all of this itself.
var ActionFlagNames = []string{"in", "root", "image", "git", "submodules", "out", "env", "pass-env", "property", "timeout", "seed", "memory", "cpu-time", "cpus", "processes", "listen-loopback", "allow", "on-violation"}

// Register adds the flags of an action that runs once.
func (r *ActionFlags) Register(cmd *cobra.Command) {
	r.RegisterInputs(cmd)
	f := cmd.Flags()
	f.StringArrayVar(&r.Out, "out", nil, "output path, relative to the working directory; repeatable")
	f.DurationVar(&r.Timeout, "timeout", 0, "time limit of the command (default: 24h)")
	f.StringVar(&r.seed, "seed", "", "number to derive all randomness from; the command receives it as CLOISTER_SEED")
}

// RegisterInputs adds the flags for files, variables and properties.
func (r *ActionFlags) RegisterInputs(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&r.in, "in", "", "directory of inputs (default: none)")
	f.StringVar(&r.git, "git", "", "commit with the inputs, instead of --in: DIRECTORY@REVISION of a repository")
	f.StringVar(&r.submodules, "submodules", "", "handling of submodules with --git: empty makes empty directories (default: an error)")
	f.StringArrayVar(&r.env, "env", nil, "environment variable, KEY=VALUE; repeatable")
	f.StringArrayVar(&r.passEnv, "pass-env", nil, "name of an environment variable to pass on; repeatable")
	f.StringArrayVar(&r.property, "property", nil, "platform property, NAME=VALUE, such as cloister-memory=8GiB; repeatable")
	flags.Share(f, "pass-env", "submodules")
}

// RegisterRoot adds the flag for a directory as the root file system.
func (r *ActionFlags) RegisterRoot(cmd *cobra.Command) {
	cmd.Flags().StringVar(&r.root, "root", "", "directory to use as the root file system")
}

// RegisterImage adds the flag for a container image as the root file system.
func (r *ActionFlags) RegisterImage(cmd *cobra.Command) {
	cmd.Flags().StringVar(&r.image, "image", "", "container image to run in: a reference, an OCI layout or a docker save file")
}

// RegisterOnViolation adds the flag for what violations do.
func (r *ActionFlags) RegisterOnViolation(cmd *cobra.Command) {
	cmd.Flags().StringVar(&r.onViolation, "on-violation", "", "effect of violations: report, fail or kill, or by kind, such as network:fail,write:kill")
}

// checkOnViolation turns the flag into a property.
func (r *ActionFlags) checkOnViolation() error {
	if r.onViolation == "" {
		return nil
	}
	p := policy.Property{Name: "cloister-on-violation", Value: r.onViolation}
	_, err := policy.Default().Compile(policy.Request{Properties: []policy.Property{p}}, sandbox.AllLimits)
	if refused, ok := errors.AsType[*policy.RefusedError](err); ok {
		return fmt.Errorf("--on-violation: %s", strings.TrimPrefix(refused.Reason, "refuses it: "))
	}
	r.property = append(r.property, p.Name+"="+p.Value)
	return err
}

// RootName returns the root file system as the flags name it: a directory, an image, or "" for the host's toolchain.
func (r *ActionFlags) RootName() string { return cmp.Or(r.root, r.image) }

// Registries returns the registry of --image, which the command may use, or nothing.
func (r *ActionFlags) Registries() []string {
	if r.image == "" || r.container.File != "" {
		return nil
	}
	return []string{r.container.Reference.Registry()}
}

// Check validates the flags.
func (r *ActionFlags) Check() error {
	if r.git != "" {
		if r.in != "" {
			return errors.New("--in and --git both name the inputs: pass one of them")
		}
		var err error
		if r.repository, r.rev, err = revision.Split(r.git); err != nil {
			return fmt.Errorf("--git %w", err)
		}
	}
	for _, dir := range [][2]string{{"--in", r.in}, {"--root", r.root}} {
		if dir[1] == "" {
			continue
		}
		if fi, err := os.Stat(dir[1]); err != nil {
			return fmt.Errorf("%s %s: %w", dir[0], dir[1], errors.Unwrap(err))
		} else if !fi.IsDir() {
			return fmt.Errorf("%s %s: write a directory", dir[0], dir[1])
		}
	}
	if r.image != "" {
		var err error
		if r.container, err = images.ParseSource(r.image); err != nil {
			return fmt.Errorf("--image: %w", err)
		}
		if r.root != "" {
			return errors.New("--root and --image both name the root file system: pass one of them")
		}
		r.property = append(r.property, images.Property+"="+r.container.Value())
	}
	switch {
	case r.submodules != "" && r.submodules != "empty":
		return fmt.Errorf("--submodules %q: write empty", r.submodules)
	case r.submodules != "" && r.git == "":
		return errors.New("--submodules needs --git")
	case r.Timeout < 0:
		return fmt.Errorf("--timeout %v: write a positive time", r.Timeout)
	}
	for _, p := range r.Out {
		if !filepath.IsLocal(p) {
			return fmt.Errorf("--out %q: write a path below the working directory", p)
		}
	}
	if r.seed != "" {
		n, err := strconv.ParseUint(r.seed, 10, 64)
		if err != nil || n == math.MaxUint64 {
			return fmt.Errorf("--seed %q: write a whole number from 0 to %d", r.seed, uint64(math.MaxUint64-1))
		}
		r.number = &n
	}
	if err := r.checkLimits(); err != nil {
		return err
	}
	if err := r.checkOnViolation(); err != nil {
		return err
	}
	if err := r.checkProperties(); err != nil {
		return err
	}
	return r.checkVariables()
}

// checkProperties collects the platform properties, sorted as the Remote Execution API requires.
func (r *ActionFlags) checkProperties() error {
	r.platform = nil
	for _, text := range r.property {
		name, value, ok := strings.Cut(text, "=")
		if !ok || name == "" {
			return fmt.Errorf("--property %q: write NAME=VALUE", text)
		}
		if r.platform == nil {
			r.platform = &repb.Platform{}
		}
		r.platform.Properties = append(r.platform.Properties, &repb.Platform_Property{Name: name, Value: value})
	}
	slices.SortFunc(r.platform.GetProperties(), func(a, b *repb.Platform_Property) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Value, b.Value))
	})
	return nil
}

// checkVariables collects the variables of the flags and of the seed.
func (r *ActionFlags) checkVariables() error {
	variables := actionVariables
	if r.Lasting {
		variables = SandboxVariables
	}
	vars, err := variables(r.env, r.passEnv)
	if err != nil {
		return err
	}
	r.variables = nil
	for _, kv := range vars {
		k, v, _ := strings.Cut(kv, "=")
		r.variables = append(r.variables, &repb.Command_EnvironmentVariable{Name: k, Value: v})
	}
	if r.number != nil {
		r.SetDefault("CLOISTER_SEED", strconv.FormatUint(*r.number, 10))
		r.SetDefault("PYTHONHASHSEED", strconv.FormatUint(*r.number%(1<<32), 10)) // Python's maximum
	}
	return nil
}

// actionVariables returns the variables of --env and --pass-env as KEY=VALUE.
func actionVariables(env, passEnv []string) ([]string, error) {
	names := map[string]bool{}
	for _, kv := range env {
		k, _, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			return nil, fmt.Errorf("--env %q: write KEY=VALUE", kv)
		}
		names[k] = true
	}
	vars := slices.Clone(env)
	for _, k := range passEnv {
		v, ok := os.LookupEnv(k)
		switch {
		case k == "" || strings.Contains(k, "="):
			return nil, fmt.Errorf("--pass-env %q: write the name of a variable; --env KEY=VALUE sets a value", k)
		case !ok:
			return nil, fmt.Errorf("--pass-env %s: not set in this environment", k)
		case names[k]:
			return nil, fmt.Errorf("--pass-env %s: given twice", k)
		}
		names[k] = true
		vars = append(vars, k+"="+v)
	}
	return vars, nil
}

// SandboxVariables returns the variables of --env and --pass-env, sorted, for a sandbox that outlives a command and its
// commands: unset variables are not passed on, and values that are passed on override those of --env. A secret is only
// passed on, because a command line is visible to other users and stays in the shell's history.
func SandboxVariables(env, passEnv []string) ([]string, error) {
	vars := map[string]string{}
	for _, kv := range env {
		k, v, ok := strings.Cut(kv, "=")
		switch {
		case !ok || !variableName.MatchString(k):
			return nil, fmt.Errorf("--env %q: write KEY=VALUE, where KEY consists of letters, digits and _", kv)
		case slices.Contains(secrets, k) && !slices.Contains(passEnv, k):
			return nil, fmt.Errorf("--env %s: a command line does not keep a secret; set %[1]s in this environment and write --pass-env %[1]s", k)
		}
		vars[k] = v
	}
	for _, k := range passEnv {
		if !variableName.MatchString(k) {
			return nil, fmt.Errorf("--pass-env %q: write the name of a variable, of letters, digits and _; --env KEY=VALUE sets a value", k)
		}
		if v, ok := os.LookupEnv(k); ok {
			vars[k] = v
		}
	}
	list := make([]string, 0, len(vars))
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		list = append(list, k+"="+vars[k])
	}
	return list, nil
}

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// secrets are variables whose values are secrets.
var secrets = []string{
	"ACTIONS_RUNTIME_TOKEN", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET",
	"CARGO_REGISTRY_TOKEN", "CI_JOB_TOKEN", "DOCKER_AUTH_CONFIG", "GEMINI_API_KEY", "GH_TOKEN", "GITHUB_TOKEN", "GITLAB_TOKEN",
	"HF_TOKEN", "MYSQL_PWD", "NODE_AUTH_TOKEN", "NPM_TOKEN", "OPENAI_API_KEY", "PGPASSWORD", "SSHPASS", "TWINE_PASSWORD",
	"UV_PUBLISH_TOKEN", "VAULT_TOKEN",
}

// has reports whether the command has the variable.
func (r *ActionFlags) has(name string) bool {
	return slices.ContainsFunc(r.variables, func(v *repb.Command_EnvironmentVariable) bool { return v.Name == name })
}

// SetDefault sets a variable of the command unless it is set.
func (r *ActionFlags) SetDefault(name, value string) {
	if !r.has(name) {
		r.variables = append(r.variables, &repb.Command_EnvironmentVariable{Name: name, Value: value})
	}
}

// Put puts the action into the default instance of w, and returns its task. The progress of a pull goes to notes.
func (r *ActionFlags) Put(ctx context.Context, w *Worker, notes io.Writer) (*worker.Task, error) {
	in, err := w.Store.Instance("")
	if err != nil {
		return nil, err
	}
	task := &worker.Task{Seed: r.number}
	var root cas.Digest
	switch {
	case r.git != "":
		var rv *revision.Revision
		if rv, err = r.readRevision(ctx, w, in.Store); err == nil {
			root, task.Revision = rv.Root, rv.Commit
			r.SetDefault("SOURCE_DATE_EPOCH", strconv.FormatInt(rv.Time.Unix(), 10)) // reproducible-builds.org/specs/source-date-epoch
		}
	case r.in != "":
		root, err = readDirectory(ctx, in.Store, r.in)
	default:
		root, err = cas.PutProto(ctx, in.Store, cas.SHA256, &repb.Directory{})
	}
	if err != nil {
		return nil, fmt.Errorf("read inputs: %w", err)
	}
	if r.Program != "" {
		if root, err = addProgram(ctx, in.Store, root, r.Program); err != nil {
			return nil, err
		}
	}
	if r.root != "" {
		if task.Root, err = readDirectory(ctx, in.Store, r.root); err != nil {
			return nil, fmt.Errorf("read the root file system: %w", err)
		}
	}
	if r.image != "" {
		if task.Image, err = w.images.Fetch(ctx, "", r.container, notes); err != nil {
			return nil, err
		}
	}
	task.Action, err = r.PutAction(ctx, in.Store, root)
	return task, err
}

// PutAction puts the Command and the Action.
func (r *ActionFlags) PutAction(ctx context.Context, store cas.Store, root cas.Digest) (cas.Digest, error) {
	cmd := &repb.Command{Arguments: r.Args, EnvironmentVariables: slices.Clone(r.variables), Platform: r.platform}
	slices.SortStableFunc(cmd.EnvironmentVariables, func(a, b *repb.Command_EnvironmentVariable) int { return strings.Compare(a.Name, b.Name) })
	for _, p := range r.Out {
		cmd.OutputPaths = append(cmd.OutputPaths, filepath.ToSlash(filepath.Clean(p)))
	}
	slices.Sort(cmd.OutputPaths)
	command, err := cas.PutProto(ctx, store, cas.SHA256, cmd)
	if err != nil {
		return cas.Digest{}, err
	}
	action := &repb.Action{CommandDigest: command.Proto(), InputRootDigest: root.Proto(), DoNotCache: true, Platform: r.platform}
	if r.Timeout > 0 {
		action.Timeout = durationpb.New(r.Timeout)
	}
	return cas.PutProto(ctx, store, cas.SHA256, action)
}

// readRevision puts the files of a commit, with the same size limit as fetched actions.
func (r *ActionFlags) readRevision(ctx context.Context, w *Worker, store cas.Store) (*revision.Revision, error) {
	size, err := flags.DiskBytes(w.Dir)
	if err != nil {
		return nil, err
	}
	rv, err := revision.Read(ctx, revision.Config{
		Store: store, Function: cas.SHA256, Dir: w.Dir, MaxBytes: size / 5, EmptySubmodules: r.submodules == "empty",
	}, r.repository, r.rev)
	if errors.Is(err, revision.ErrSubmodule) {
		err = fmt.Errorf("%w; set --submodules empty to run without its files, or make a commit that has them", err)
	}
	if errors.Is(err, revision.ErrTooLarge) {
		err = fmt.Errorf("%w: a fifth of the disk of the temporary directory; set TMPDIR to a larger disk", err)
	}
	return rv, err
}

// readDirectory puts the files of a directory.
func readDirectory(ctx context.Context, store cas.Store, name string) (cas.Digest, error) {
	dir, err := os.OpenRoot(name)
	if err != nil {
		return cas.Digest{}, err
	}
	root, err := tree.Ingest(ctx, store, cas.SHA256, dir)
	return root, errors.Join(err, dir.Close())
}
