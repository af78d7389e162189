// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
)

func init() { roles["full"] = fillFileSystem }

// The file system is a small one, mounted in a mount namespace that ends with the child.
func TestFullFileSystemIsErrFull(t *testing.T) {
	cmd := child(t, "full", t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	err := cmd.Run()
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EINVAL) {
		if strings.Contains(os.Getenv("CLOISTER_REQUIRE"), "namespaces") {
			t.Fatalf("user namespaces are required: %v", err)
		}
		t.Skipf("this host permits no user and mount namespace: %v", err)
	}
	if err != nil {
		t.Error(err)
	}
}

func fillFileSystem(args []string) error {
	dir := args[0]
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,mode=700"); err != nil {
		return fmt.Errorf("mount tmpfs: %w", err)
	}
	ctx := context.Background()
	c, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 30})
	if err != nil {
		return err
	}
	in, err := c.Instance("")
	if err != nil {
		return err
	}
	syscall.Umask(0o077) // must not change what is promised of a file's mode
	var stored []cas.Digest
	for i := range 100 {
		b, d := castest.Blob(byte(i), 100_000)
		if err = in.Store.Put(ctx, d, bytes.NewReader(b)); err != nil {
			break
		}
		stored = append(stored, d)
	}
	if !errors.Is(err, cas.ErrFull) || !errors.Is(err, syscall.ENOSPC) ||
		!strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "free space") {
		return fmt.Errorf("after %d blobs Put: got %v, want ErrFull that names %s and says what to do",
			len(stored), err, dir)
	}
	big := &repb.ActionResult{StdoutRaw: make([]byte, 100_000)}
	if err := in.Actions.Record(ctx, stored[0], big); !errors.Is(err, cas.ErrFull) {
		return fmt.Errorf("Record: got %v, want ErrFull", err)
	}
	// What was stored is untouched, and nothing of the rest remains.
	missing, err := in.Store.Missing(ctx, stored)
	if err != nil || len(missing) > 0 {
		return fmt.Errorf("%d of %d stored blobs are missing: %v", len(missing), len(stored), err)
	}
	fi, err := os.Lstat(pathOf(dir, "blobs", stored[0]))
	if err != nil {
		return err
	}
	if fi.Mode() != plain {
		return fmt.Errorf("under umask 077 a blob has mode %v, want %v", fi.Mode(), os.FileMode(plain))
	}
	return errors.Join(c.Check(ctx), c.Close())
}
