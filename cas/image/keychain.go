// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"fmt"

	"github.com/google/go-containerregistry/pkg/authn"
)

// A patientKeychain waits for the credentials of a Keychain until the context ends: a credential helper is a program
// that may never answer, and go-containerregistry does not end it.
type patientKeychain struct{ authn.Keychain }

// ResolveContext implements authn.ContextKeychain.
func (k patientKeychain) ResolveContext(ctx context.Context, r authn.Resource) (authn.Authenticator, error) {
	type answer struct {
		authn.Authenticator
		error
	}
	answered := make(chan answer, 1)
	go func() {
		a, err := authn.Resolve(ctx, k.Keychain, r)
		answered <- answer{a, err}
	}()
	select {
	case a := <-answered:
		return a.Authenticator, a.error
	case <-ctx.Done():
		return nil, fmt.Errorf("no credentials for %s yet: %w", host(r.RegistryStr()), context.Cause(ctx))
	}
}
