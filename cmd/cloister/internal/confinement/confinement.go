// SPDX-License-Identifier: Apache-2.0

// Package confinement defines the flags that select the sandbox and the policy of actions.
package confinement

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/gvisor"
	"github.com/cloister-build/cloister/sandbox/jobobject"
	"github.com/cloister-build/cloister/sandbox/microvm"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/seatbelt"
	"github.com/cloister-build/cloister/worker"
	"github.com/spf13/cobra"
)

// Flags select how actions are confined.
type Flags struct {
	Tier       string
	Policy     string
	sourceTree string
	images     []string
	endpoints  []string // that the built-in policy allows
}

// RegisterTier adds the flag for the isolation tier.
func (c *Flags) RegisterTier(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.Tier, "sandbox", defaultTier(), "isolation: full; namespaces, for hosts without seccomp, Landlock or the syscall monitor; gvisor, a kernel per action; qemu or microvm, virtual machines of QEMU or msb; qemu-tcg, emulated ones without protection, for tests; seatbelt, for macOS; or jobobject, for Windows, which confines neither files nor network")
	flags.Share(f, "sandbox")
}

// defaultTier returns the default of --sandbox. Only the operator may choose a backend that does not confine, so the
// default runs nothing on Windows.
func defaultTier() string {
	if runtime.GOOS == "darwin" {
		return seatbelt.Name
	}
	return "full"
}

// Register adds the flags.
func (c *Flags) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	c.RegisterTier(cmd)
	f.StringVar(&c.Policy, "policy", "", "file with the policy of actions (default: see cloister policy explain)")
	f.StringVar(&c.sourceTree, "source-tree", "", "directory to search for undeclared inputs; audits actions in full unless the policy sets a level")
	flags.Share(f, "policy", "source-tree")
}

// RegisterImages adds the flag for actions that name a container image, to commands that execute such actions.
func (c *Flags) RegisterImages(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringSliceVar(&c.images, "images", nil, "allowed registries of container images; ignore runs actions that name an image with the host's toolchain")
	flags.Share(f, "images")
}

// IgnoreImages reports whether actions that name a container image run with the toolchain of this machine.
func (c *Flags) IgnoreImages() bool { return slices.Equal(c.images, []string{"ignore"}) }

// Images returns the rules for container images: those of p, and the registries of --images.
func (c *Flags) Images(p *policy.Policy) (policy.Images, error) {
	rules := p.Images()
	if c.IgnoreImages() {
		return rules, nil
	}
	if c.named() && len(c.images) > 0 {
		return rules, exit.New(exit.Usage, fmt.Errorf("--sandbox %s runs no container images: omit --images and --image, or choose another --sandbox", c.Tier))
	}
	for _, r := range c.images {
		if r == "ignore" || !image.IsPlace(r) {
			return rules, exit.New(exit.Usage, fmt.Errorf("--images %+.80q: write registries as HOST, HOST:PORT or HOST/PATH, or only ignore", r))
		}
	}
	rules.Registries = slices.Concat(rules.Registries, c.images)
	return rules, nil
}

// AllowRegistries adds registries to those of --images, which must not be ignore.
func (c *Flags) AllowRegistries(registries []string) error {
	if len(registries) > 0 && c.IgnoreImages() {
		return errors.New("--image conflicts with --images=ignore: pass one of them")
	}
	c.images = append(c.images, registries...)
	return nil
}

// AllowEndpoints makes the built-in policy allow endpoints. With --policy, only the file decides.
func (c *Flags) AllowEndpoints(endpoints []sandbox.Endpoint) {
	for _, e := range endpoints {
		c.endpoints = append(c.endpoints, e.String())
	}
}

// ImageFlags returns the flags that another command needs to treat images like this one.
func (c *Flags) ImageFlags() []string {
	if len(c.images) == 0 {
		return nil
	}
	return []string{"--images", strings.Join(c.images, ",")}
}

// BackendConfig returns the configuration of the sandbox.
func (c *Flags) BackendConfig() (namespace.Config, error) {
	var config namespace.Config
	switch c.Tier {
	case "full", gVisor, qemuKVM, qemuTCG, microVM, seatbelt.Name, jobobject.Name:
	case "namespaces":
		config.Without = namespace.NamespacesOnly
	default:
		return config, exit.New(exit.Usage, fmt.Errorf("--sandbox %q: write full, namespaces, gvisor, microvm, qemu, qemu-tcg, seatbelt or jobobject", c.Tier))
	}
	if c.sourceTree != "" {
		dir, err := filepath.Abs(c.sourceTree)
		if err != nil {
			return config, err
		}
		if st, err := os.Stat(dir); err != nil || !st.IsDir() {
			return config, exit.New(exit.Usage, fmt.Errorf("--source-tree %s: %w", dir, cmp.Or(err, errors.New("not a directory"))))
		}
		if c.Tier != "full" {
			return config, exit.New(exit.Usage, fmt.Errorf("--source-tree needs the syscall monitor, which --sandbox %s lacks; pass only one of them", c.Tier))
		}
		config.Source = map[string]string{worker.ExecRoot: dir, dir: dir}
	}
	return config, nil
}

// NamespaceConfig is BackendConfig for commands that support namespaces only.
func (c *Flags) NamespaceConfig() (namespace.Config, error) {
	config, err := c.BackendConfig()
	if err == nil && c.named() {
		err = exit.New(exit.Usage, fmt.Errorf("--sandbox %s: this command needs full or namespaces; serve, join, run, repro and sandbox create support it", c.Tier))
	}
	return config, err
}

// Values of --sandbox for the packages gvisor and microvm, which are also the names of their backends.
const (
	gVisor  = "gvisor"
	qemuKVM = "qemu"
	qemuTCG = "qemu-tcg"
	microVM = "microvm"
)

// named reports whether actions run in another backend than that of namespaces, which has the name of its tier.
func (c *Flags) named() bool { return c.Tier != "full" && c.Tier != "namespaces" }

// NewBackend returns the backend of --sandbox, which has the configuration if it is of namespaces. The caller closes
// it.
func (c *Flags) NewBackend(config namespace.Config) sandbox.Backend {
	switch c.Tier {
	case gVisor:
		return gvisor.New()
	case qemuKVM, qemuTCG:
		return microvm.NewQEMU(c.Tier == qemuTCG)
	case microVM:
		return microvm.NewMSB()
	case seatbelt.Name:
		return seatbelt.New()
	case jobobject.Name:
		return jobobject.New()
	}
	return namespace.New(config)
}

// Offers returns what a worker with this backend offers to actions that require it, besides its other properties.
func (c *Flags) Offers() []worker.Property {
	if !c.named() {
		return nil
	}
	return []worker.Property{{Name: worker.PropertySandbox, Value: c.Tier}}
}

// Warning returns a warning about the selected --sandbox, or "".
func (c *Flags) Warning() string {
	switch c.Tier {
	case qemuTCG:
		return "warning: --sandbox qemu-tcg emulates a processor, which is no security boundary: use it for tests only"
	case jobobject.Name:
		return "warning: --sandbox jobobject confines neither files nor network, and does not protect this process"
	}
	return ""
}

// LoadPolicy returns the policy of --policy, or the built-in one, on this machine. With --source-tree, actions are
// fully audited unless the file says otherwise.
func (c *Flags) LoadPolicy() (*policy.Policy, error) {
	p := policy.Default()
	var err error
	switch {
	case c.Policy != "":
		p, err = ParseFile("--policy", c.Policy, policy.Parse)
	case len(c.endpoints) > 0:
		allow := "{network: {allow: [" + strings.Join(c.endpoints, ", ") + "]}}"
		p, err = policy.Parse("--allow", []byte("version: 1\nprofiles: {build: "+allow+", test: "+allow+"}\n"))
	}
	if err != nil {
		return nil, err
	}
	host := thisHost()
	if c.sourceTree != "" {
		host.Audit = sandbox.AuditFull
	}
	return p.On(host), nil
}

// DefaultPolicy returns the built-in policy on this machine.
func DefaultPolicy() *policy.Policy { return policy.Default().On(thisHost()) }

// ReadPolicy reads a policy file for this machine. Errors begin with what names the file.
func ReadPolicy(what, file string) (*policy.Policy, error) {
	p, err := ParseFile(what, file, policy.Parse)
	if err != nil {
		return nil, err
	}
	return p.On(thisHost()), nil
}

// ParseFile reads and parses a file. Its errors are usage errors; a read error begins with what, such as a flag.
func ParseFile[T any](what, file string, parse func(file string, text []byte) (*T, error)) (*T, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, exit.New(exit.Usage, fmt.Errorf("%s: %w", what, err))
	}
	p, err := parse(file, text)
	if err != nil {
		return nil, exit.New(exit.Usage, err)
	}
	return p, nil
}

// TierText returns the tier with the limits that this host does not enforce.
func TierText(f sandbox.Features) string {
	var off []string
	defaults := sandbox.DefaultLimits() // an action that requests another limit is refused without it
	for _, l := range sandbox.AllLimits {
		if defaults.Of(l) != sandbox.Unlimited && !slices.Contains(f.Limits, l) {
			off = append(off, string(l))
		}
	}
	if len(off) == 0 {
		return f.Tier
	}
	return fmt.Sprintf("%s, without limits of %s", f.Tier, strings.Join(off, ", "))
}

// Banner prints how actions are confined.
func (c *Flags) Banner(out io.Writer, f sandbox.Features, p *policy.Policy) {
	fmt.Fprintf(out, "sandbox  %s   (%s)\n", strings.Join(f.Layers, ", "), TierText(f))
	var off []string
	for _, check := range f.Checks {
		if !check.OK {
			line := check.Name
			if check.Fix != "" {
				line += " (fix: " + check.Fix + ")"
			}
			off = append(off, line)
		}
	}
	if len(off) > 0 {
		fmt.Fprintf(out, "         not enforced: %s; see cloister check\n", strings.Join(off, ", "))
	}
	c.BannerPolicy(out, p)
}

// BannerPolicy prints which policy is in force, if --policy names it.
func (c *Flags) BannerPolicy(out io.Writer, p *policy.Policy) {
	if c.Policy != "" {
		fmt.Fprintf(out, "policy   %s   (%.12s)\n", c.Policy, p.Hash())
	}
}
