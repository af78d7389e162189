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

// A Graph is a package //graph of generated targets in layers, whose outputs are known without a build. It is not safe
// for concurrent use.
type Graph struct {
	Layers, Width int // at least 1 and 2
	// Lines is the number of lines of 9 bytes in a target's output; nil means none. A line of 65 bytes precedes them.
	Lines func(layer, i int) int
	// Pause is how long each action sleeps, in the format of sleep(1); "" means not at all.
	Pause string

	edits map[string]int // calls of Edit by target name
}

// node is the script of each target. Its output depends on every byte of its inputs.
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

// below returns the targets of the previous layer on which a target depends.
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

// each calls visit for every target after its dependencies.
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

// Edit changes the source of a target, so that it and its dependents must be rebuilt.
func (g *Graph) Edit(layer, i int) {
	if g.edits == nil {
		g.edits = map[string]int{}
	}
	g.edits[name(layer, i)]++
}

// Inputs returns the files that actions read, by name.
func (g *Graph) Inputs() map[string][]byte {
	files := map[string][]byte{"node.sh": []byte(node)}
	g.each(func(name string, _, _ int) { files[name+".src"] = []byte(g.source(name)) })
	return files
}

// Outputs returns the expected outputs of a build, by file name.
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
		// Seven hexadecimal digits always fit.
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

// Write writes the package into a workspace. It leaves unchanged files alone.
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
