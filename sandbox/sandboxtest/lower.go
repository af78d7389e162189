// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

// lowerTree are the inputs below the output of overInputs: files by path. A path that ends in a slash is a directory.
var lowerTree = []string{
	"dir/", "dir/sub/", "empty/", "dir/file", "dir/sub/deep", "file", "exec", "link", "dir/link",
}

// overInputs is a run of a script with bash in /build, which has the inputs of lowerTree below it. They contain their
// own path. The script's function try reports whether a command succeeds.
func overInputs(script string) Run {
	r := bash(`try() { if (eval "$*") 2>/tmp/err; then echo "yes $*"; else echo "no $*"; fi; }` + "\n" + script)
	r.Setup = func(t testing.TB, ws *os.Root) {
		dir := func(p string) {
			must.Succeed(t, ws.Mkdir(p, 0o700))
			must.Succeed(t, ws.Chmod(p, 0o777|fs.ModeSticky))
		}
		dir("in")
		for _, p := range lowerTree {
			switch {
			case strings.HasSuffix(p, "/"):
				// The directories of the output are those that a run with the worker's user may change.
				dir("in/" + strings.TrimSuffix(p, "/"))
				dir("out/" + strings.TrimSuffix(p, "/"))
			case strings.HasSuffix(p, "link"):
				must.Succeed(t, ws.Symlink("file", "in/"+p))
			case p == "exec":
				write(t, ws, "in/"+p, "#!/bin/sh\necho exec\n", 0o755)
			default:
				write(t, ws, "in/"+p, p, 0o644)
			}
		}
	}
	args := r.Spec
	r.Spec = func(s *sandbox.Spec) {
		args(s)
		s.Lower = []sandbox.Lower{{Target: "/build", Content: "x", Source: "in"}}
	}
	return r
}

// lower: every directory of an output over inputs accepts new entries, and no input changes, as root and as an ordinary
// user.
func lower(t *testing.T, b sandbox.Backend) {
	if f := features(t, b); !f.Lower {
		lacks(t, f, "namespaces", "this kernel cannot mount an overlay over inputs")
	}
	for _, c := range []struct{ name, yes, no string }{
		{"new entries", `touch new dir/new dir/sub/new empty/new
			mkdir -p dir/a/b/c && touch dir/a/b/c/new
			ln -s file dir/newlink; mkfifo dir/sub/pipe; ln new dir/hard
			rm new; mv dir/new renamed; mv dir/a moved; mv moved dir/sub/; rm -r dir/sub/moved; mkdir empty/y && rmdir empty/y`, ``},
		{"copies", `cp file copy && echo more >> copy && cp -r dir other && echo more >> other/sub/deep && rm -r other
			cp exec run && ./run && chmod 600 run && touch -d 2001-01-01 run
			sed s/file/changed/ file > file.new && grep changed file.new`, ``},
		{"reading", `test $(cat file) = file; test $(cat dir/sub/deep) = dir/sub/deep; ./exec; test $(cat link) = file
			test "$(stat -c %a file exec dir empty . | xargs)" = "644 755 1777 1777 1777"
			test "$(echo *)" = "dir empty exec file link"; test "$(cd dir && echo *)" = "file link sub"`, ``},
		{"writing", ``, `echo x >> file; echo x > dir/file; : > dir/sub/deep; : >| file; truncate -s 0 file
			dd if=/dev/zero of=file conv=notrunc bs=1 count=1; python3 -c '__import__("mmap").mmap(open("file", "r+b").fileno(), 0)'
			echo x >> link; echo x >> dir/link; tee exec < /dev/null; python3 -c '__import__("os").open("file", os.O_RDWR)'`},
		{"metadata", ``, `chmod 666 file; chmod u+w dir/file; chmod 777 exec; touch file; touch -d 2001-01-01 file
			touch -h -d 2001-01-01 link; chown 1000 file; chgrp 1000 dir/file
			python3 -c '__import__("os").setxattr("file", "user.x", b"x")'
			python3 -c '__import__("os").setxattr("file", "user.overlay.opaque", b"y")'
			python3 -c '__import__("os").setxattr("file", "trusted.overlay.opaque", b"y")'`},
		{"names", ``, `rm -f file; rm -f dir/file; rm -f link; rm -rf dir; rmdir dir; unlink dir/sub/deep
			mv file x; mv dir/file x; mv link x; mv -T dir x; ln file x; ln dir/file dir/sub/x; ln -P link x
			touch x && mv -f x file; touch y && mv -f y dir/link; mv exec file; cp --remove-destination exec file
			ln -sf exec file; ln -sfT exec dir; mkdir z && mv -T z dir; python3 -c '__import__("os").replace("exec", "file")'`},
		{"whiteouts", ``, `mknod w c 0 0; mknod dir/w c 0 0; mknod dir/sub/w b 0 0; mknod /tmp/w c 0 0`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if strings.Contains(c.no, "python3") {
				Tool(t, "python3")
			}
			commands := func(text string) (list []string) {
				for line := range strings.Lines(text) {
					for command := range strings.SplitSeq(line, "; ") {
						if command = strings.TrimSpace(command); command != "" {
							list = append(list, command)
						}
					}
				}
				return list
			}
			var script strings.Builder
			for _, command := range slices.Concat(commands(c.yes), commands(c.no)) {
				script.WriteString("try '" + strings.ReplaceAll(command, "'", `'\''`) + "'\n")
			}
			script.WriteString("cat file dir/file dir/sub/deep; stat -c '%n %a %h %Y %N' file dir/file dir/sub/deep exec link dir/link\n")
			r := overInputs(script.String())
			r.Check = func(t testing.TB, out *os.Root, _ string) { onlyNewFiles(t, out) }
			r.Do(t, b)
			_, after, _ := strings.Cut("\n"+r.Stdout, "\nfiledir/filedir/sub/deep")
			if strings.Count(after, "\n") != 6 {
				t.Errorf("inputs: got\n%s\n%s", r.Stdout, r.Stderr)
			}
			for _, command := range commands(c.yes) {
				if !strings.Contains("\n"+r.Stdout, "\nyes "+command+"\n") {
					t.Errorf("%s failed:\n%s", command, r.Stdout)
				}
			}
			for _, command := range commands(c.no) {
				if !strings.Contains("\n"+r.Stdout, "\nno "+command+"\n") {
					t.Errorf("%s succeeded:\n%s", command, r.Stdout)
				}
			}
		})
	}
}

// onlyNewFiles fails if the upper directory of overInputs has a copy of an input or a special file other than a pipe.
func onlyNewFiles(t testing.TB, out *os.Root) {
	err := fs.WalkDir(out.FS(), ".", func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.Type()&^(fs.ModeDir|fs.ModeSymlink|fs.ModeNamedPipe) != 0:
			t.Errorf("the output has the special file %s: %v", p, d.Type())
		case !d.IsDir() && slices.Contains(lowerTree, p):
			t.Errorf("the input %s was copied or replaced", p)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// lowerViolations: the events name what a run tried with inputs below an output, and nothing else.
func lowerViolations(t *testing.T, b sandbox.Backend) {
	f := features(t, b)
	if !f.Lower || !slices.Contains(f.Audits, sandbox.AuditFull) {
		lacks(t, f, "namespaces", "this host cannot mount an overlay over inputs, or cannot monitor runs")
	}
	r := overInputs(`echo new > dir/new; mv dir/new new; chmod 600 new; rm new; mkdir d; mv d dir/; cat file > copy; ./exec
		echo x >> file; rm -f dir/file; mv exec x; chmod 600 dir/sub/deep; ln file hard; touch x; mv x link; true`)
	args := r.Spec
	r.Spec = func(s *sandbox.Spec) { args(s); s.Audit = sandbox.AuditFull }
	r.Do(t, b)
	var got []string
	for _, e := range r.Result.Events {
		got = append(got, string(e.Kind)+" "+e.Subject+" "+e.Process)
	}
	want := []string{
		"write /build/dir/file rm", "write /build/dir/sub/deep chmod", "write /build/exec mv", "write /build/file bash",
		"write /build/file ln", "write /build/link mv",
	}
	slices.Sort(got)
	if got = slices.Compact(got); !slices.Equal(got, want) {
		t.Errorf("got events\n%s\nwant\n%s\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"), r.Stderr)
	}
	for _, p := range []string{"/build/file", "/build/exec"} {
		if !slices.Contains(r.Result.Opened, p) {
			t.Errorf("opened: got %v, want %s too", r.Result.Opened, p)
		}
	}
	if slices.Contains(r.Result.Opened, "/build/copy") {
		t.Errorf("opened: got %v, want inputs only", r.Result.Opened)
	}
}
