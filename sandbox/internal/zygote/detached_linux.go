// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// maxWorkspaceFiles bounds the files of an unlimited workspace: each takes about 1 KiB of memory that cannot be
// reclaimed. The kernel bounds the bytes of an unlimited tmpfs, at half of the memory.
const maxWorkspaceFiles = 1_500_000

// NewWorkspace returns the descriptor of a detached tmpfs. It has one page and one file more than the limits: when
// nothing is left, the run wanted more. It needs the right to mount.
func NewWorkspace(size WorkspaceSize) (int, error) {
	if size.Files <= 0 {
		size.Files = maxWorkspaceFiles
	}
	size.Files++
	options := [][2]string{{"mode", "0755"}, {"source", "workspace"}, {"nr_inodes", strconv.FormatInt(size.Files, 10)}}
	if size.Bytes > 0 {
		options = append(options, [2]string{"size", strconv.FormatInt(size.Bytes+int64(os.Getpagesize()), 10)})
	}
	return detached("tmpfs", options, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
}

// An imageName is the descriptor number under which images are mounted, one at a time. Mount tables show it as the
// source, which should be the same on every host.
var imageName struct {
	sync.Mutex
	fd int
}

// firstImageName is the lowest value of imageName.fd.
const firstImageName = 1000

// NewImage returns the descriptor of a detached mount of an EROFS image file with devices as its extra devices (Linux
// 6.12). The caller may close the files. It needs the right to mount.
func NewImage(image *os.File, devices []*os.File) (int, error) {
	options := make([][2]string, 1, 1+len(devices))
	for _, d := range devices {
		options = append(options, [2]string{"device", fdPath(int(d.Fd()))})
	}
	imageName.Lock()
	defer imageName.Unlock()
	if imageName.fd == 0 {
		fd, err := unix.FcntlInt(image.Fd(), unix.F_DUPFD_CLOEXEC, firstImageName)
		if err != nil {
			return -1, fmt.Errorf("descriptor of an image: %w", err)
		}
		imageName.fd = fd
	} else if err := unix.Dup3(int(image.Fd()), imageName.fd, unix.O_CLOEXEC); err != nil {
		return -1, fmt.Errorf("descriptor of an image: %w", err)
	}
	options[0] = [2]string{"source", fdPath(imageName.fd)}
	return detached("erofs", options, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOATIME)
}

func fdPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// detached returns the descriptor of a new file system that is mounted nowhere.
func detached(fsType string, options [][2]string, attrs int) (int, error) {
	fs, err := unix.Fsopen(fsType, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", fsType, err)
	}
	defer unix.Close(fs)
	for _, kv := range options {
		if err := unix.FsconfigSetString(fs, kv[0], kv[1]); err != nil {
			return -1, fmt.Errorf("%s %s=%s: %w", fsType, kv[0], kv[1], err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("make %s: %w", fsType, err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return -1, fmt.Errorf("mount %s: %w", fsType, err)
	}
	return fd, nil
}
