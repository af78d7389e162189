// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// An action with a root file system never runs with the host's.
func TestRootIsNotIgnored(t *testing.T) {
	b := newBench(t, compiles)
	root := must.Get(cas.FromProto(cas.SHA256, b.put(&repb.Directory{})))(t)
	_, err := b.Execute(t.Context(), &Task{Action: b.action(nil), Root: root}, nil)
	wantFault(t, "an action with a root file system", err, FaultUnmet)
}

// TestImageFaults: clients retry a failure of the store or of this host during a pull, but no other failure.
func TestImageFaults(t *testing.T) {
	for err, kind := range map[error]FaultKind{
		cas.ErrUnavailable:             FaultUnavailable,
		cas.ErrThrottled:               FaultUnavailable,
		cas.ErrUnwritable:              FaultUnavailable,
		cas.ErrFull:                    FaultExhausted,
		cas.ErrUpstreamFull:            FaultExhausted,
		syscall.ENOSPC:                 FaultExhausted,
		cas.ErrInvalid:                 FaultInvalid,
		context.Canceled:               FaultCancelled,
		context.DeadlineExceeded:       FaultUnmet, // of the pull
		cas.ErrNotFound:                FaultUnmet, // no such image was loaded
		cas.ErrDenied:                  FaultUnmet,
		errors.New("MANIFEST_UNKNOWN"): FaultUnmet,
		fmt.Errorf("%w (%w)", cas.ErrUpstreamFull, errors.ErrUnsupported): FaultUnmet, // a file is too large
	} {
		got := imageFault(fmt.Errorf("pull image a/b: %w", err))
		wantFault(t, err.Error(), got, kind)
		expect.Text(t, got.Error(), err.Error())
	}
}
