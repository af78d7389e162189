// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// propertyRemoteAPIs is the platform property whose value is the path of the socket. Policy grants it.
const propertyRemoteAPIs = "remoteApisSocketPath"

// socketName is the name of the socket for remote APIs in the workspace, beside outDir.
const socketName = "apis"

// tempDir is the temporary directory of every action.
const tempDir = "/tmp"

// placeSocket adds the socket that the policy grants, if any, to spec. It returns the path of the socket relative to
// the input root, or "" if it is outside.
func (l *Local) placeSocket(t *Task, req *request, g *policy.Grant, spec *sandbox.Spec) (inRoot string, err error) {
	if g.RemoteAPIs == "" {
		return "", nil
	}
	p := Property{Name: propertyRemoteAPIs, Value: g.RemoteAPIs}
	switch {
	case l.cfg.RemoteAPIs == nil || t.Caller == nil:
		return "", faultf(FaultUnmet, "confine: %w: action %s needs %s, which only cloister serve supports, for actions of its clients "+
			"on its own slots: not cloister join, cloister run or cloister repro", sandbox.ErrUnsupported, req.Digest, p)
	case t.Caller.Depth >= actionapi.MaxDepth:
		return "", faultf(FaultUnmet, "confine: action %s needs %s, but actions nest at most %d deep: execute it from the outermost action",
			req.Digest, p, actionapi.MaxDepth)
	}
	target := g.RemoteAPIs
	if !path.IsAbs(target) {
		target = path.Join(req.place.path, target)
	}
	spec.Sockets = []sandbox.Input{{Target: target, Content: "remote-apis", Source: socketName}}
	below := func(dir string) bool { return strings.HasPrefix(target, strings.TrimSuffix(dir, "/")+"/") }
	switch {
	case path.Clean(target) != target || strings.ContainsRune(target, 0) || below("/dev") || below("/proc") || below(hostsFile):
	case below(tempDir):
		return "", nil
	case below(req.place.path):
		inRoot = strings.TrimPrefix(target, strings.TrimSuffix(req.place.path, "/")+"/")
		return inRoot, fault(StageConfine, req.addSocket(inRoot, t))
	}
	return "", faultf(FaultInvalid, "confine: property %s: the path is neither a clean one below the input root %s nor one below %s",
		p, req.place.path, tempDir)
}

// addSocket adds a socket at a path relative to the input root to the layout.
func (req *request) addSocket(p string, t *Task) error {
	refuse := func(why string) error {
		return invalidf("property %s: %+.256q %s: choose another path", propertyRemoteAPIs, p, why)
	}
	if _, ok := req.Input.Lookup(p); ok {
		return refuse("is an input")
	}
	for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
		if kind, ok := req.Input.Lookup(dir); ok && kind != tree.Directory {
			return refuse("is below an input that is not a directory")
		}
	}
	for _, o := range req.outputs {
		if o == p || strings.HasPrefix(o, p+"/") {
			return refuse("is an output or a parent of one")
		}
	}
	var dirs []string
	if t.expects(req) {
		dirs = req.directories
	}
	layout, err := req.Input.Plan(req.Command.WorkingDirectory, append(slices.Clip(req.outputs), p), dirs)
	if err == nil {
		req.Layout = layout
	}
	return err
}

// serveSocket makes the socket of box in the workspace, and serves the remote APIs of the instance on it.
func (l *Local) serveSocket(t *Task, box *confined, ws sandbox.Workspace) (actionapi.Session, error) {
	if len(box.spec.Sockets) == 0 {
		return nil, nil
	}
	listener, err := listenIn(ws.Root(), socketName)
	if err != nil {
		return nil, fmt.Errorf("socket for remote APIs: %w", err)
	}
	return l.cfg.RemoteAPIs.Serve(actionapi.Action{Caller: t.Caller, Instance: t.Instance, Invocation: t.Invocation}, listener), nil
}

// called records in r what the action did with remote APIs.
func (r *ran) called(box *confined, u actionapi.Use) {
	if u.Calls == 0 {
		return
	}
	r.remote = manifest.NewRemoteAPIs(u.Fetched)
	r.Events = append(r.Events, sandbox.Event{
		Kind: sandbox.EventAllowed, Subject: "unix " + box.spec.Sockets[0].Target, Count: u.Calls,
		Detail: fmt.Sprintf("remote APIs; %d blobs and results fetched", len(u.Fetched)),
	})
}

// removeSocket removes the entry at the path of the socket, normally the empty file that the socket was mounted over, so
// that it does not become an output. An entry that the action put there instead is removed, too, except a directory with
// entries: the path is no output. Failures are ignored, as the action may have moved or removed its parents.
func (s *staged) removeSocket(box *confined) {
	if box.socket != "" {
		_ = s.out.Remove(box.socket)
	}
}
