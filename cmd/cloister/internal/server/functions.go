// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/quota"
	"github.com/cloister-build/cloister/cmd/internal/flags"
)

// These limit the instances whose functions are learned, in all and from one caller, who must not use up those of the
// others. Further instances keep their default functions.
const (
	maxLearned         = 10_000
	maxLearnedByCaller = 1_000
)

// A functionTable knows the digest functions of requests that state none: those of the flag, or those that the first
// upload to an instance matches. If an instance's clients use several functions, the flag and the defaults decide.
type functionTable struct {
	flag *flags.DigestFunctions
	log  *slog.Logger

	mu sync.RWMutex
	// learned has functions by instance, at most one for each length of hashes. Slices are replaced, not modified.
	learned map[string][]cas.Function
	// taught counts the instances of learned by the caller of the first upload.
	taught map[string]int
}

func newFunctionTable(flag *flags.DigestFunctions, log *slog.Logger) *functionTable {
	return &functionTable{flag: flag, log: log, learned: map[string][]cas.Function{}, taught: map[string]int{}}
}

// instances returns next with the functions of the flag and those learned.
func (t *functionTable) instances(next cas.Instances) cas.Instances {
	next = t.flag.Instances(next)
	return func(name string) (*cas.Instance, error) {
		in, err := next(name)
		if err != nil {
			return nil, err
		}
		t.mu.RLock()
		learned := t.learned[name]
		t.mu.RUnlock()
		if len(learned) == 0 {
			return in, nil
		}
		known := *in
		known.Unstated = slices.Concat(in.Unstated, learned)
		return &known, nil
	}
}

// report implements casserver.Config.Unstated.
func (t *functionTable) report(ctx context.Context, instance string, f cas.Function) error {
	if set := t.flag.Of(instance); set != 0 && set.Size() == f.Size() {
		return t.check(instance, set, f)
	}
	fallback := defaultFunction(f.Size())
	t.mu.Lock()
	defer t.mu.Unlock()
	learned, caller := t.learned[instance], quota.Caller(ctx)
	i := slices.IndexFunc(learned, func(g cas.Function) bool { return g.Size() == f.Size() })
	switch {
	case learned == nil && (len(t.learned) >= maxLearned || t.taught[caller] >= maxLearnedByCaller):
		return t.check(instance, fallback, f)
	case i < 0:
		if learned == nil {
			t.taught[caller]++
		}
		t.learned[instance] = append(slices.Clone(learned), f)
		if f != fallback {
			t.log.Info("clients that state no digest function do not use the default one",
				"instance", instance, "function", f.String(), "default", fallback.String())
		}
		return nil
	case learned[i] == f:
		return nil
	case f == fallback:
		t.log.Warn("clients that state no digest function use several; the default applies; "+
			"use --digest-function, or an instance for each function",
			"instance", instance, "functions", []string{learned[i].String(), f.String()}, "default", f.String())
		learned = slices.Clone(learned)
		learned[i] = f
		t.learned[instance] = learned
		return nil
	}
	return t.check(instance, learned[i], f)
}

// check returns an error unless f, which content matches, is the function that applies.
func (t *functionTable) check(instance string, applies, f cas.Function) error {
	if f == applies {
		return nil
	}
	return fmt.Errorf("%w digest function: the data matches %v, but in instance %q requests without a digest function mean %v; "+
		"state the function, use another instance, or ask the operator for --digest-function %s=%v",
		cas.ErrInvalid, f, instance, applies, instance, f)
}

// defaultFunction returns the function that requests without one mean by default, for hashes of size bytes.
func defaultFunction(size int) cas.Function {
	for _, f := range cas.Functions() {
		if f.Size() == size {
			return f
		}
	}
	return 0
}
