// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"encoding/binary"
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/windows"
)

// verbatim returns the form of dir in which Windows looks up names unchanged: in other paths it drops dots and spaces
// at the end of names.
func verbatim(dir string) string {
	const prefix = `\\?\`
	share, isShare := strings.CutPrefix(dir, `\\`)
	switch {
	case strings.HasPrefix(dir, prefix):
		return dir
	case isShare:
		return prefix + `UNC\` + share
	}
	return prefix + dir
}

// fileBytes returns the size of a file with all its streams. It asks the file, because Windows updates the sizes in
// directories late.
func fileBytes(name string) (int64, error) {
	path, err := windows.UTF16PtrFromString(name)
	if err != nil {
		return 0, err
	}
	h, err := windows.CreateFile(path, windows.FILE_READ_ATTRIBUTES,
		windows.FILE_SHARE_READ|windows.FILE_SHARE_WRITE|windows.FILE_SHARE_DELETE, nil, windows.OPEN_EXISTING,
		windows.FILE_FLAG_BACKUP_SEMANTICS|windows.FILE_FLAG_OPEN_REPARSE_POINT, 0)
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer func() { _ = windows.CloseHandle(h) }()
	streams := make([]byte, 1<<10)
	err = windows.GetFileInformationByHandleEx(h, windows.FileStreamInfo, &streams[0], uint32(len(streams)))
	for errors.Is(err, windows.ERROR_MORE_DATA) && len(streams) < 1<<20 {
		streams = make([]byte, 2*len(streams))
		err = windows.GetFileInformationByHandleEx(h, windows.FileStreamInfo, &streams[0], uint32(len(streams)))
	}
	switch {
	case errors.Is(err, windows.ERROR_HANDLE_EOF): // a directory without streams
		return 0, nil
	case errors.Is(err, windows.ERROR_INVALID_PARAMETER), errors.Is(err, windows.ERROR_INVALID_FUNCTION):
		// The file system, or Wine, has no streams.
		var info windows.ByHandleFileInformation
		err := windows.GetFileInformationByHandle(h, &info)
		return int64(info.FileSizeHigh)<<32 | int64(info.FileSizeLow), err
	case err != nil:
		return 0, &os.PathError{Op: "list streams of", Path: name, Err: err}
	}
	// FILE_STREAM_INFO: the offset of the next, the length of the name, the size, and more.
	n := int64(0)
	for {
		n += int64(binary.LittleEndian.Uint64(streams[8:]))
		next := binary.LittleEndian.Uint32(streams)
		if next == 0 {
			return n, nil
		}
		streams = streams[next:]
	}
}
