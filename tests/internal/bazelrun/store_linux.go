// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
)

// Verify runs cas verify on the store of cfg, whether or not a server holds it. It returns the number of blobs and
// results, or an error that names the damaged ones.
func Verify(ctx context.Context, cfg ServerConfig) (int, error) {
	cmd := exec.CommandContext(ctx, cfg.Binary, "cas", "verify", "--restart", "--json", "--dir", cfg.Dir)
	cmd.Dir, cmd.Env = "/", environment(cfg.Home)
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	ended := cmd.Run()
	var report struct {
		Complete bool
		Blobs    int
		Damaged  []struct{ Digest, Where string }
	}
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		return 0, fmt.Errorf("cas verify: %w: %s%s", ended, &out, &problems)
	}
	var damaged []string
	for _, d := range report.Damaged {
		damaged = append(damaged, d.Digest+" in "+d.Where)
	}
	if len(damaged) > 0 {
		return report.Blobs, fmt.Errorf("damaged: %s", strings.Join(damaged, "; "))
	}
	if ended != nil || !report.Complete {
		return report.Blobs, fmt.Errorf("cas verify: %w: %s", ended, &problems)
	}
	return report.Blobs, nil
}
