// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// Without access rules, the console shows what is for operators only to the user who runs the server.
func TestOperatorsAreTheUserOfTheServer(t *testing.T) {
	s := &server{Config: &Config{}}
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.operator(r); err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
		}
	}))
	defer web.Close()
	r, err := web.Client().Get(web.URL)
	must.Succeed(t, err)
	r.Body.Close()
	expect.Equal(t, r.StatusCode, http.StatusOK, "the same user")
	forged := httptest.NewRequest(http.MethodGet, "/", nil)
	expect.That(t, s.operator(forged) != nil, "an unknown connection is admitted")
	curl, err := exec.LookPath("curl")
	if os.Getuid() != 0 || err != nil {
		t.Log("another user needs root and curl")
		return
	}
	c := exec.Command(curl, "-s", "-o", os.DevNull, "-w", "%{http_code}", web.URL)
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65532, Gid: 65532}}
	out := must.Get(c.Output())(t)
	expect.Equal(t, string(out), "403", "another user")
}
