// SPDX-License-Identifier: Apache-2.0

package repro_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// seeds is the number of checks of a coin.
const seeds = 30

// verdictsOfCoins returns the distinct verdicts, with their numbers, on an action that tosses coins, from many
// checks with all factors but parallel. Checks that find no difference are omitted.
func verdictsOfCoins(t *testing.T, act func(coins *rand.Rand, v *worker.Variation) string) map[string]int {
	got := map[string]int{}
	for seed := range uint64(seeds) {
		s := newScript(t, func(n int, v *worker.Variation) made {
			return file(act(rand.New(rand.NewPCG(seed, uint64(n))), v))
		})
		o := s.options()
		o.Bisect = true
		o.Factors = slices.DeleteFunc(slices.Clone(o.Factors), func(f repro.Factor) bool { return f == "parallel" })
		v := check(t, s.action(), o)
		if v.Result == repro.Same {
			continue
		}
		b := v.Bisection
		verdict := fmt.Sprintf("factors %q", repro.Join(b.Factors))
		for _, d := range v.Differences {
			verdict += fmt.Sprintf(", %s by %q", d.Cause, repro.Join(d.Factors))
		}
		if len(b.Nondeterministic) > 0 {
			verdict += ", nondeterministic"
		}
		got[verdict]++
	}
	return got
}

// toss returns heads with a probability, else tails.
func toss(coins *rand.Rand, p float64, heads, tails string) string {
	if coins.Float64() < p {
		return heads
	}
	return tails
}

var keysOfMap = strings.Split("alpha beta gamma delta epsilon zeta eta theta", " ")

// swapped returns keysOfMap on lines of their own, in one of a few orders.
func swapped(i int) string {
	keys := slices.Clone(keysOfMap)
	keys[i], keys[i+1] = keys[i+1], keys[i]
	return strings.Join(keys, "\n") + "\n"
}

// TestChanceNamesNoFactor: an output that differs between identical runs has the same verdict however the coins of the
// first controls and of the varied runs fell, and no factor.
func TestChanceNamesNoFactor(t *testing.T) {
	for name, act := range map[string]func(coins *rand.Rand, v *worker.Variation) string{
		"fair coin": func(coins *rand.Rand, _ *worker.Variation) string { return "\x00" + toss(coins, 0.5, "x", "y") },
		"bent coin": func(coins *rand.Rand, _ *worker.Variation) string { return "\x00" + toss(coins, 0.3, "x", "y") },
		"die": func(coins *rand.Rand, _ *worker.Variation) string {
			return "\x00" + strings.Repeat("o", 1+coins.IntN(6))
		},
		"digit": func(coins *rand.Rand, _ *worker.Variation) string { return fmt.Sprint("\x00", coins.IntN(6)) },
		"new values": func(coins *rand.Rand, _ *worker.Variation) string {
			return "\x00" + toss(coins, 0.5, "x", "y") + strings.Repeat("z", coins.IntN(1000))
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := verdictsOfCoins(t, act); len(got) != 1 || got[`factors "",  by "", nondeterministic`] == 0 {
				t.Errorf("got %v, want no factor in any", got)
			}
		})
	}
}

// TestTemporaryPathNamesNoFactor: processes that race for a temporary file leave another path now and then. That is not
// due to the random numbers, although those also change the names of such files.
func TestTemporaryPathNamesNoFactor(t *testing.T) {
	got := verdictsOfCoins(t, func(coins *rand.Rand, _ *worker.Variation) string {
		return "made by way of " + toss(coins, 0.1, "/tmp/tmp.aX3kQ9/out", "/tmp/tmp.bY4mR7/out") + "\n"
	})
	for verdict := range got {
		expect.That(t, strings.HasPrefix(verdict, `factors "", path by ""`), "got %v, want no factor in any", got)
	}
}

// TestTemporaryPathOfRandomNumbers: a path that depends on the random numbers is due to them.
func TestTemporaryPathOfRandomNumbers(t *testing.T) {
	got := verdictsOfCoins(t, func(coins *rand.Rand, v *worker.Variation) string {
		return fmt.Sprintf("made by way of /tmp/tmp.aX%04d/out\n", observedSeed(coins, v)%10_000)
	})
	expect.That(t, len(got) == 1 && got[`factors "random", path by "random"`] == seeds, "got %v", got)
}

// TestPairsAreComparedOnce: in a file with many random values, each pair of runs is compared about as often as in one
// with a single value.
func TestPairsAreComparedOnce(t *testing.T) {
	reads := func(values int) int {
		s := newScript(t, func(n int, _ *worker.Variation) made {
			coins, text := rand.New(rand.NewPCG(1, uint64(n))), "{"
			heads := coins.IntN(2) == 0
			for i := range values {
				text += fmt.Sprintf("%q: %t, ", fmt.Sprint("value", i), heads)
			}
			return file(text + `"end": 0}`)
		})
		counting := &countingStore{Store: s.store}
		o := s.options()
		o.Bisect, o.Executors[0].Store = true, counting
		check(t, s.action(), o)
		return counting.reads
	}
	if one, many := reads(1), reads(40); many > 2*one {
		t.Errorf("got %d reads with one value, %d with 40; want about as many", one, many)
	}
}

// A countingStore counts reads.
type countingStore struct {
	cas.Store
	reads int
}

func (s *countingStore) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	s.reads++
	return s.Store.Open(ctx, d, off)
}

// TestRacesHaveOneVerdict: processes that race for the order of lines do so in all runs.
func TestRacesHaveOneVerdict(t *testing.T) {
	got := verdictsOfCoins(t, func(coins *rand.Rand, _ *worker.Variation) string {
		return toss(coins, 0.5, swapped(0), swapped(2))
	})
	if len(got) != 1 || got[`factors "", parallel by "", nondeterministic`] == 0 { // parallel is not varied
		t.Errorf("got %v", got)
	}
}

// TestRandomOrderOfThreadsHasOneVerdict: threads that share random numbers change the order of a hash table now and
// then, in other numbers on one processor. That is no factor beside the random numbers.
func TestRandomOrderOfThreadsHasOneVerdict(t *testing.T) {
	for _, p := range []float64{0, 0.02, 0.1, 0.5} {
		t.Run(fmt.Sprint(p), func(t *testing.T) {
			got := verdictsOfCoins(t, func(coins *rand.Rand, v *worker.Variation) string {
				switch {
				case v.Conditions.RandomSeed == 0:
					keys := slices.Clone(keysOfMap)
					coins.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
					return strings.Join(keys, "\n") + "\n"
				case v.Conditions.CPUs == 1:
					return swapped(2)
				}
				return toss(coins, p, swapped(2), swapped(0))
			})
			for verdict := range got {
				if verdict = strings.TrimSuffix(verdict, ", nondeterministic"); verdict != `factors "random", hash seed by "random"` {
					t.Errorf("got %v", got)
				}
			}
		})
	}
}

// TestFactorsBesideChance: a factor that changes the same line as a coin is found however the coins fall.
func TestFactorsBesideChance(t *testing.T) {
	for name, sides := range map[string]float64{"never": 0, "rarely": 0.05, "often": 0.5} {
		t.Run(name, func(t *testing.T) {
			got := verdictsOfCoins(t, func(coins *rand.Rand, v *worker.Variation) string {
				return "begin\n" + toss(coins, sides, "fast", "slow") + " by " + observed("hostname", 0, v) + "\nend\n"
			})
			for verdict := range got {
				if !strings.HasPrefix(verdict, `factors "hostname", `) || !strings.Contains(verdict, `by "hostname"`) {
					t.Errorf("got %v", got)
				}
			}
		})
	}
}

// TestCausesBesideChance: with a coin among them, random values keep their cause.
func TestCausesBesideChance(t *testing.T) {
	got := verdictsOfCoins(t, func(coins *rand.Rand, v *worker.Variation) string {
		return toss(coins, 0.5, "fast", "slow") + "\nkey " + fmt.Sprintf("%016x", observedSeed(coins, v)) + "\n"
	})
	for verdict := range got {
		if !strings.HasPrefix(verdict, `factors "random", `) || !strings.Contains(verdict, string(compare.Random)+` by "random"`) {
			t.Errorf("got %v", got)
		}
	}
}

// observedSeed returns a random number, always the same if it is held.
func observedSeed(coins *rand.Rand, v *worker.Variation) uint64 {
	if v.Conditions.RandomSeed != 0 {
		return 0x9e3779b97f4a7c15
	}
	return coins.Uint64()
}
