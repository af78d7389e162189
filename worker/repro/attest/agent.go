// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"bytes"
	"context"
	"crypto/rsa"
	"encoding/asn1"
	"errors"
	"fmt"
	"math/big"
	"net"
	"slices"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
)

// AgentKey returns a key that signs through the ssh-agent at a socket, which must hold the private half of public. Each
// signature is a request to the agent, which may ask a person. It fails if no ssh-agent signs with the key.
func AgentKey(ctx context.Context, socket string, public *Key) (*Key, error) {
	if public == nil || public.public == nil {
		return nil, errNoKey
	}
	k := *public
	a := sshAgent{socket: socket, key: &k}
	if err := a.has(ctx); err != nil {
		return nil, fmt.Errorf("%w: %w", errAgent, err)
	}
	k.sign = func(ctx context.Context, data []byte) ([]byte, error) {
		signature, err := a.sign(ctx, data)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errAgent, err)
		}
		return signature, nil
	}
	return &k, nil
}

// An sshAgent uses one key of an ssh-agent.
type sshAgent struct {
	socket string
	key    *Key
}

// ask calls f with a client. Its connection ends with ctx.
func (a *sshAgent) ask(ctx context.Context, f func(agent.ExtendedAgent) error) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", a.socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := f(agent.NewClient(conn)); err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	return nil
}

// has fails if the agent does not have the key.
func (a *sshAgent) has(ctx context.Context) error {
	return a.ask(ctx, func(c agent.ExtendedAgent) error {
		all, err := c.List()
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(all, func(k *agent.Key) bool { return bytes.Equal(k.Blob, a.key.wire.Marshal()) }) {
			return fmt.Errorf("none of the %d keys at %s is %s; run ssh-add KEY", len(all), a.socket, a.key.id)
		}
		return nil
	})
}

// agentMax is the largest text that OpenSSH's agent signs: a message of AGENT_MAX_LEN bytes less its framing.
const agentMax = 256<<10 - 4<<10

// sign returns the agent's signature of data in the form that Key.verify accepts.
func (a *sshAgent) sign(ctx context.Context, data []byte) (signature []byte, err error) {
	err = a.ask(ctx, func(c agent.ExtendedAgent) error {
		flags := agent.SignatureFlags(0)
		if _, ok := a.key.public.(*rsa.PublicKey); ok {
			flags = agent.SignatureFlagRsaSha256
		}
		s, err := c.SignWithFlags(a.key.wire, data, flags)
		if err != nil {
			return err
		}
		signature, err = a.plain(s)
		return err
	})
	if err != nil && len(data) > agentMax {
		err = fmt.Errorf(
			"%w (the statement has %d bytes; OpenSSH's agent signs at most %d: sign with the key file instead)", err,
			len(data), agentMax)
	}
	return signature, err
}

// plain removes the SSH encoding (RFC 4253, 5656, 8332, 8709) from a signature.
func (a *sshAgent) plain(s *ssh.Signature) ([]byte, error) {
	switch s.Format {
	case ssh.KeyAlgoED25519:
		return s.Blob, nil
	case ssh.KeyAlgoECDSA256:
		var n struct{ R, S *big.Int }
		if err := ssh.Unmarshal(s.Blob, &n); err != nil {
			return nil, err
		}
		return asn1.Marshal(n)
	case ssh.KeyAlgoRSASHA256:
		// Some agents drop leading zeros.
		if public, ok := a.key.public.(*rsa.PublicKey); ok && len(s.Blob) < public.Size() {
			return append(make([]byte, public.Size()-len(s.Blob)), s.Blob...), nil
		}
		return s.Blob, nil
	}
	return nil, fmt.Errorf("the agent returned a signature of another type: %q", s.Format)
}
