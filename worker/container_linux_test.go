// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// An imageRoot is what Root returns for an image.
type imageRoot struct {
	Root cas.Digest
	Env  []string
}

// An imageSet implements Images for fixed images.
type imageSet struct {
	pins  map[string]string // from property values to pinned references
	roots map[string]imageRoot
	stale []cas.Digest // of each call of Root
	// repull is called for a root that the store has lost.
	repull func()
}

func (s *imageSet) Pin(_ context.Context, _, value string) (string, error) {
	if pinned := s.pins[value]; pinned != "" {
		return pinned, nil
	}
	return "", fmt.Errorf("registry of %s is not allowed", value)
}

func (s *imageSet) Root(_ context.Context, _, pinned string, stale cas.Digest) (cas.Digest, []string, error) {
	s.stale = append(s.stale, stale)
	if !stale.IsZero() {
		s.repull()
	}
	r, ok := s.roots[pinned]
	if !ok {
		return cas.Digest{}, nil, errors.New("MANIFEST_UNKNOWN: manifest unknown")
	}
	return r.Root, r.Env, nil
}

const (
	pinnedOne = "registry.example/tools@sha256:1111"
	pinnedTwo = "registry.example/tools@sha256:2222"
)

// withImages gives c two images, the first of which has a tag, too.
func (c *confining) withImages() *imageSet {
	s := &imageSet{
		pins: map[string]string{
			"docker://" + pinnedOne: pinnedOne, "docker://" + pinnedTwo: pinnedTwo, "docker://registry.example/tools:v1": pinnedOne,
			"docker://registry.example/gone@sha256:3333": "registry.example/gone@sha256:3333",
		},
		roots: map[string]imageRoot{
			pinnedOne: {Root: c.rootFiles(map[string]string{"etc/marker": "first\n"}), Env: []string{"PATH=/bin", "KIND=image"}},
			pinnedTwo: {Root: c.rootFiles(map[string]string{"etc/marker": "second\n"})},
		},
	}
	c.cfg.Images = s
	return s
}

// TestActionRunsInImage: an action that names a container image runs in its root file system with its environment,
// unless the command sets a variable itself. Metadata and stable hash name the image. A result is cached if the action
// names the image's digest.
func TestActionRunsInImage(t *testing.T) {
	rootWorkers(t, func(t *testing.T, c *confining) {
		s := c.withImages()
		r := rootRun{
			script: "cat /etc/marker input; echo $KIND $SET; ls -d /usr/share 2>/dev/null; true", env: map[string]string{"SET": "command"},
			platform: platform("Container-Image", "docker://"+pinnedOne), cache: true,
		}
		ran := c.run(r, Task{}, "first\nan input\nimage command\n")
		root := s.roots[pinnedOne].Root
		expect.Equal(t, ran.meta.ImageArchitecture, runtime.GOARCH, "architecture")
		if ran.meta.Image != pinnedOne || ran.meta.Root != root.String() || len(ran.meta.IgnoredProperties) > 0 {
			t.Errorf("metadata: got image %q, root %q, ignored %q", ran.meta.Image, ran.meta.Root, ran.meta.IgnoredProperties)
		}
		calls := len(s.stale)
		if again := c.run(r, Task{}, ""); !again.outcome.Cached || len(s.stale) != calls {
			t.Errorf("second request: got cached %t and %d more calls for the image, want a cached result and none", again.outcome.Cached,
				len(s.stale)-calls)
		}
		r.platform = platform("container-image", "docker://"+pinnedTwo)
		other := c.run(r, Task{}, "second\nan input\ncommand\n")
		expect.That(t, other.outcome.StableHash != ran.outcome.StableHash,
			"both images have the stable hash %s", other.outcome.StableHash)
		r.platform, r.script = platform("container-image", "docker://"+pinnedTwo, "chroot-path", "/"), "cat /etc/marker /input"
		c.run(r, Task{}, "second\nan input\n")
	})
}

// TestUnpinnedImages: a tag, or an image of the default properties, is not part of the action's digest, so the result
// is cached only if the operator permits that. Requests that were admitted with different images share no run.
func TestUnpinnedImages(t *testing.T) {
	c := newConfining(t, onDisk(t), 0)
	c.needsRoots()
	s := c.withImages()
	byDefault := parsePolicy(t, "version: 1\ndefault_properties:\n  \"\": {container-image: \"docker://"+pinnedOne+"\"}\n")
	tag := "docker://registry.example/tools:v1"
	for i, row := range []struct {
		image         string // of the action
		cacheUnpinned bool
		cached        bool
	}{{tag, false, false}, {tag, true, true}, {"", false, false}, {"", true, true}} {
		c.cfg.Policy, c.cfg.CacheUnpinned = policy.Default(), row.cacheUnpinned
		r := rootRun{script: fmt.Sprintf("cat /etc/marker; true %d", i), env: map[string]string{"PATH": "/bin"}, cache: true}
		if r.platform = platform("container-image", row.image); row.image == "" {
			c.cfg.Policy, r.platform = byDefault, nil
		}
		ran := c.run(r, Task{}, "first\n")
		expect.That(t, ran.outcome.Uncacheable != row.cached,
			"image %q, cache unpinned %t: got uncacheable %t", row.image, row.cacheUnpinned, ran.outcome.Uncacheable)
		action := ran.action
		_, err := c.in.Actions.Lookup(t.Context(), action)
		if (err == nil) != row.cached {
			t.Errorf("image %q, cache unpinned %t: lookup got %v, want it cached: %t", row.image, row.cacheUnpinned, err, row.cached)
		}
		task := Task{Action: action}
		first, err := c.Admit(t.Context(), &task)
		must.Be(t, err == nil && task.Image == pinnedOne,
			"image %q: got %q, %v, want the digest of the tag", row.image, task.Image, err)
		if row.image == "" {
			continue
		}
		s.pins[tag] = pinnedTwo
		if second, err := c.Admit(t.Context(), &Task{Action: action}); err != nil || first.MergeKey == second.MergeKey {
			t.Errorf("image %q: the tag moved, and both requests have the merge key %q (%v)", row.image, first.MergeKey, err)
		}
		if row.cached {
			c.run(r, task, "") // a hit, as admitted
			moved := c.run(r, Task{Action: action}, "second\n")
			expect.That(t, !moved.outcome.Cached, "image %q: the tag moved, and the old image's result is a hit", row.image)
		}
		task.SkipCacheLookup = true
		c.run(r, task, "first\n") // as admitted
		s.pins[tag] = pinnedOne
	}
}

// TestLostImages: Admit returns the pull of an image. An image that the store has lost is pulled again, and a store
// that cannot keep it is reported.
func TestLostImages(t *testing.T) {
	c := newConfining(t, onDisk(t), 0)
	c.needsRoots()
	s := c.withImages()
	admission, err := c.Admit(t.Context(), &Task{Action: c.actionOf(&rootRun{script: "true", platform: platform("container-image", "docker://"+pinnedOne)})})
	must.Be(t, err == nil && admission.Pull != nil, "Admit got %+v, %v, want a Pull", admission, err)
	if err := admission.Pull(t.Context()); err != nil || len(s.stale) != 1 {
		t.Fatalf("Pull got %v and %d calls for the image, want 1", err, len(s.stale))
	}
	s.stale = nil
	lost := cas.SHA256.Sum([]byte("an absent Directory"))
	kept := s.roots[pinnedTwo]
	s.roots[pinnedTwo] = imageRoot{Root: lost}
	s.repull = func() { s.roots[pinnedTwo] = kept }
	r := rootRun{script: "cat /etc/marker", env: map[string]string{"PATH": "/bin"}, platform: platform("container-image", "docker://"+pinnedTwo)}
	c.run(r, Task{}, "second\n")
	expect.Slices(t, s.stale, []cas.Digest{{}, lost}, "calls with")
	s.roots[pinnedTwo], s.repull = imageRoot{Root: lost}, func() {}
	f := wantFault(t, "a store that loses the image twice", c.try(&r, Task{}), FaultExhausted)
	if !strings.Contains(f.Error(), pinnedTwo) || !strings.Contains(f.Error(), "increase the size of the store") {
		t.Errorf("got %q, want the image and the advice in it", f)
	}
}

// TestRefusedImages: Admit refuses an image that the operator does not permit and properties that contradict each
// other, and pulls nothing. The registry's message reaches the client.
func TestRefusedImages(t *testing.T) {
	c := newConfining(t, onDisk(t), 0)
	s := c.withImages()
	for _, row := range []struct {
		name     string
		pairs    []string
		admitted bool
		kind     FaultKind
		want     string
	}{
		{"another registry", []string{"container-image", "docker://elsewhere.example/x"}, false, FaultUnmet, "elsewhere.example/x is not allowed"},
		{"two images", []string{"Container-Image", "docker://" + pinnedOne, "container-image", "docker://" + pinnedTwo}, false, FaultInvalid, "set one of them"},
		{"absent image", []string{"container-image", "docker://registry.example/gone@sha256:3333"}, true, FaultUnmet, "MANIFEST_UNKNOWN"},
	} {
		r := rootRun{script: "true", platform: platform(row.pairs...)}
		f := wantFault(t, row.name, c.try(&r, Task{}), row.kind)
		expect.Text(t, f.Error(), row.want, "%s", row.name)
		calls := len(s.stale)
		a, err := c.Admit(t.Context(), &Task{Action: r.action})
		if row.admitted != (err == nil) && c.cfg.Features.Root || len(s.stale) != calls {
			t.Errorf("%s: Admit got %v and %d calls for the image, want it admitted: %t, and none", row.name, err, len(s.stale)-calls, row.admitted)
		}
		if err != nil {
			continue
		}
		expect.Text(t, wantFault(t, row.name, a.Pull(t.Context()), row.kind).Error(), row.want, "%s: Pull", row.name)
	}
	c.cfg.Features.Root = false
	_, err := c.Admit(t.Context(), &Task{Action: c.actionOf(&rootRun{script: "true", platform: platform("container-image", "docker://"+pinnedOne)})})
	expect.Error(t, wantFault(t, "a kernel without root file systems", err, FaultUnmet), sandbox.ErrUnsupported)
}
