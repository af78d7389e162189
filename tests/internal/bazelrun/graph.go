// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// A Graph is a package //graph of generated targets, layer upon layer. What each of them builds is known
// without a build. It is not safe for concurrent use.
type Graph struct {
	Layers, Width int // at least 1 and 2
	// Lines is the length of the output of a target, in lines of 9 bytes; nil is none. Each output has
	// one more line before them, of 65 bytes.
	Lines func(layer, i int) int
	// Pause is how many seconds each action sleeps, as sleep(1) reads it; "" is not at all.
	Pause string

	edits map[string]int // how often Edit has changed a source, by the name of its target
}

// node is what each target runs. Its output depends on every byte of its inputs.
const node = `#!/bin/bash
# node.sh LINES SECONDS OUT SRC...
set -eu -o pipefail
lines=$1 seconds=$2 out=$3
shift 3
sleep "$seconds"
hash=$(cat "$@" | sha256sum)
hash=${hash%% *}
{
  echo "$hash"
  awk -v x=$((16#${hash:0:7} + 1)) -v n="$lines" 'BEGIN {
    while (n-- > 0) { x = x * 16807 % 2147483647; printf "%08x\n", x }
  }'
} > "$out"
`

func name(layer, i int) string { return fmt.Sprintf("n%d_%d", layer, i) }

// below returns those of the layer before on which a target depends.
func (g *Graph) below(layer, i int) []string {
	if layer == 0 {
		return nil
	}
	return []string{name(layer-1, i), name(layer-1, (i+1+layer%(g.Width-1))%g.Width)}
}

func (g *Graph) lines(layer, i int) int {
	if g.Lines == nil {
		return 0
	}
	return g.Lines(layer, i)
}

// each calls visit for every target, those on which it depends before it.
func (g *Graph) each(visit func(name string, layer, i int)) {
	for layer := range g.Layers {
		for i := range g.Width {
			visit(name(layer, i), layer, i)
		}
	}
}

func (g *Graph) source(name string) string {
	return fmt.Sprintf("source of %s, edition %d\n", name, g.edits[name])
}

// Edit changes the source of a target, so that it is built anew, and so is what depends on it.
func (g *Graph) Edit(layer, i int) {
	if g.edits == nil {
		g.edits = map[string]int{}
	}
	g.edits[name(layer, i)]++
}

// Inputs returns the files of the package that actions read, by name.
func (g *Graph) Inputs() map[string][]byte {
	files := map[string][]byte{"node.sh": []byte(node)}
	g.each(func(name string, _, _ int) { files[name+".src"] = []byte(g.source(name)) })
	return files
}

// Outputs returns what a build makes, by name of the file.
func (g *Graph) Outputs() map[string][]byte {
	outputs := map[string][]byte{}
	g.each(func(name string, layer, i int) {
		h := sha256.New()
		h.Write([]byte(g.source(name)))
		for _, dep := range g.below(layer, i) {
			h.Write(outputs[dep+".out"])
		}
		hash := hex.EncodeToString(h.Sum(nil))
		out := []byte(hash + "\n")
		// Seven digits always fit.
		seed, _ := strconv.ParseUint(hash[:7], 16, 64)
		for x, n := seed+1, g.lines(layer, i); n > 0; n-- {
			x = x * 16807 % 2147483647
			out = hex.AppendEncode(out, binary.BigEndian.AppendUint32(nil, uint32(x)))
			out = append(out, '\n')
		}
		outputs[name+".out"] = out
	})
	return outputs
}

// Write writes the package into a workspace. Files that are there already as they should be are left alone.
func (g *Graph) Write(workspace string) error {
	var build strings.Builder
	build.WriteString("# SPDX-License-Identifier: Apache-2.0\n")
	pause := g.Pause
	if pause == "" {
		pause = "0"
	}
	g.each(func(name string, layer, i int) {
		srcs := []string{name + ".src"}
		for _, dep := range g.below(layer, i) {
			srcs = append(srcs, ":"+dep)
		}
		fmt.Fprintf(&build, "genrule(name = %q, srcs = [\"%s\"], outs = [%q], tools = [\"node.sh\"], "+
			"cmd = \"$(location node.sh) %d %s $@ $(SRCS)\")\n",
			name, strings.Join(srcs, `", "`), name+".out", g.lines(layer, i), pause)
	})
	files := g.Inputs()
	files["BUILD.bazel"] = []byte(build.String())
	dir := filepath.Join(workspace, "graph")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path := filepath.Join(dir, name)
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, files[name]) {
			continue
		}
		if err := os.WriteFile(path, files[name], 0o755); err != nil {
			return err
		}
	}
	return nil
}
