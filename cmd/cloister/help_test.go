// SPDX-License-Identifier: Apache-2.0

package main

import (
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// verbs are the words that begin the short texts of commands.
var verbs = regexp.MustCompile(`^(Cancel|Check|Compare|Copy|Create|Download|End|Execute|Explain|Find|Free|Generate|List|Move|Parse|Print|Remove|Resume|Run|Serve|Show|Stop|Upload|Verify|Write) `)

// TestHelpStyle holds the rules for help texts.
func TestHelpStyle(t *testing.T) {
	commands(func(cmd *cobra.Command) {
		path := cmd.CommandPath()
		if s := cmd.Short; len(s) > 60 || strings.HasSuffix(s, ".") || !verbs.MatchString(s) {
			t.Errorf("%s: Short is %q (%d characters), want an imperative of at most 60 without a full stop", path, s, len(s))
		}
		if cmd.Runnable() && !strings.HasPrefix(cmd.Example, "  cloister") {
			t.Errorf("%s: Example is %q, want command lines of cloister", path, cmd.Example)
		}
		if n := strings.Count(cmd.Long, "\n\n") + 1; n > 3 {
			t.Errorf("%s: Long has %d paragraphs, want at most 3", path, n)
		}
		if cmd.Parent() != nil && !cmd.Parent().HasParent() && cmd.GroupID == "" && cmd.Name() != "version" && !cmd.IsAdditionalHelpTopicCommand() {
			t.Errorf("%s: in no group", path)
		}
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			word, _, _ := strings.Cut(f.Usage, " ")
			if r := []rune(f.Usage)[0]; unicode.IsUpper(r) && strings.ToUpper(word) != word || strings.HasSuffix(f.Usage, ".") {
				t.Errorf("%s --%s: usage is %q, want lower case without a full stop", path, f.Name, f.Usage)
			}
		})
	})
}
