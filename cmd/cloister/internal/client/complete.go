// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"fmt"
	"strings"
	"time"

	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/spf13/cobra"
)

// Limits of a completion.
const (
	completed    = 30 // actions or builds
	completeTime = 2 * time.Second
)

// CompleteActions completes the names of actions for a shell: ^1, digests and targets of the latest ones in the
// history. It offers nothing if the server does not answer within two seconds.
func (s *Server) CompleteActions(cmd *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeTime)
	defer cancel()
	all, err := s.Actions(ctx, Filter{All: true}, completed)
	var names []cobra.Completion
	offer := func(name, about string) {
		if strings.HasPrefix(name, typed) {
			names = append(names, cobra.CompletionWithDesc(name, about))
		}
	}
	seen := map[string]bool{}
	for i, a := range all {
		about := strings.TrimSpace(a.Mnemonic + " " + a.Target)
		offer(fmt.Sprintf("^%d", i+1), about)
		if len(typed) >= 2 { // a digest helps only who knows its beginning
			offer(a.Digest.String(), about)
		}
		if a.Target != "" && !seen[a.Target] {
			seen[a.Target] = true
			offer(a.Target, a.Mnemonic)
		}
	}
	if err != nil {
		cobra.CompDebugln(err.Error(), false)
	}
	return names, cobra.ShellCompDirectiveDefault | cobra.ShellCompDirectiveKeepOrder
}

// CompleteInvocations completes the names of builds: ^1 and the ids of the latest ones in the history.
func (s *Server) CompleteInvocations(cmd *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeTime)
	defer cancel()
	var names []cobra.Completion
	seen := map[string]bool{}
	err := s.History(ctx, (&Filter{All: true}).Request(100_000), func(e *cloisterpb.HistoryEntry) error {
		if e.InvocationId == "" || seen[e.InvocationId] {
			return nil
		}
		seen[e.InvocationId] = true
		about := e.Time.AsTime().Local().Format(time.DateTime)
		for _, name := range []string{fmt.Sprintf("^%d", len(seen)), e.InvocationId} {
			if strings.HasPrefix(name, typed) {
				names = append(names, cobra.CompletionWithDesc(name, about))
			}
		}
		if len(seen) == completed {
			return errEnough
		}
		return nil
	})
	if err != nil && len(names) == 0 {
		cobra.CompDebugln(err.Error(), false)
	}
	return names, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
}

// Complete makes the arguments of cmd complete as names of actions, and the flags --invocation and --action, if it has
// them.
func (s *Server) Complete(cmd *cobra.Command) {
	cmd.ValidArgsFunction = s.CompleteActions
	for name, complete := range map[string]cobra.CompletionFunc{"invocation": s.CompleteInvocations, "action": s.CompleteActions} {
		if f := cmd.Flags().Lookup(name); f != nil && f.Value.Type() != "bool" {
			_ = cmd.RegisterFlagCompletionFunc(name, complete) // the flag exists, and once
		}
	}
}
