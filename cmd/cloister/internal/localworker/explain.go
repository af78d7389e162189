// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// MissingOutputs returns the paths of --out that the result lacks.
func (r *ActionFlags) MissingOutputs(result *repb.ActionResult) []string {
	produced := map[string]bool{}
	for _, f := range result.GetOutputFiles() {
		produced[f.Path] = true
	}
	for _, d := range result.GetOutputDirectories() {
		produced[d.Path] = true
	}
	for _, l := range slices.Concat(result.GetOutputSymlinks(), result.GetOutputFileSymlinks(), result.GetOutputDirectorySymlinks()) {
		produced[l.Path] = true
	}
	var missing []string
	for _, p := range r.Out {
		if !produced[filepath.ToSlash(filepath.Clean(p))] {
			missing = append(missing, p)
		}
	}
	return missing
}

// ExplainAbsent returns why a failed command may have missed a file that exists here: it is not among the inputs. It
// returns "" if no argument names one.
func (r *ActionFlags) ExplainAbsent() string {
	for i, arg := range r.Args {
		if !filepath.IsLocal(arg) || arg == "." || r.git != "" || i == 0 && !strings.Contains(arg, "/") {
			continue // i == 0: a name that is looked up in PATH
		}
		if _, err := os.Stat(arg); err != nil {
			continue
		}
		if r.in == "" {
			return fmt.Sprintf("no inputs were given, so the sandbox lacks %s; pass --in . for the files of this directory", printable.Quote(arg, 200))
		}
		if _, err := os.Stat(filepath.Join(r.in, arg)); err != nil {
			return fmt.Sprintf("%s is not among the inputs; name it relative to --in %s", printable.Quote(arg, 200), r.in)
		}
	}
	return ""
}
