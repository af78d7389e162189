// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"fmt"
	"strings"
)

// A CauseRow is what is known of a Cause. docs/causes.md is the table for people.
type CauseRow struct {
	Cause Cause
	// Meaning is one line.
	Meaning string
	// Fixes are what ends it in things of a format; that of the format "" is for all others, and the first.
	Fixes []Fix
}

// A Fix is what a person does to end differences of a cause, in one line. Format is the name of a format, as differences
// are looked for: "tar", "zip".
type Fix struct{ Format, Text string }

// Causes is the table of the causes, in the order in which docs/causes.md has them; it may not be changed.
var Causes = []CauseRow{
	{Timestamp, "the time of the run, in a field or in a text", []Fix{
		{"", "take times from SOURCE_DATE_EPOCH, in UTC, or leave them out"},
		{"ar", "write the archive with the D modifier: ar crD; ranlib -D"},
		{"tar", "tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --pax-option=delete=atime,delete=ctime"},
		{"zip", "set the files' times before (touch -d @315532800 FILE), and leave out other times: TZ=UTC zip -X"},
		{"jar", "jar --date=1980-01-01T00:00:02Z, from JDK 17 on"},
		{"gzip", "gzip -n; in Python gzip.GzipFile(..., mtime=0)"},
		{"cpio", "touch -d @0 the files first; cpio --reproducible"},
		{"elf", "leave out the time, or take it from SOURCE_DATE_EPOCH, in UTC"},
		{"gcov", "gcc -frandom-seed=FILE, with the name of the source"},
		{"go", "go build -buildvcs=false, and no time by -ldflags=-X"},
		{"pe", "link with /Brepro, or --no-insert-timestamp of GNU ld"},
		{"png", "magick -define png:exclude-chunks=date,time"},
		{"pdf", "set SOURCE_DATE_EPOCH; in TeX also FORCE_SOURCE_DATE=1"},
		{"pyc", "python -m compileall --invalidation-mode unchecked-hash"},
		{"class", "leave the time out of generated sources"},
		{"tree", "leave the time out of the file's name"},
	}},
	{BuildDate, "the preprocessor's __DATE__, __TIME__ or __TIMESTAMP__", []Fix{
		{"", `-Wno-builtin-macro-redefined -D__DATE__='"redacted"' -D__TIME__='"redacted"' -D__TIMESTAMP__='"redacted"'; or, but for __TIMESTAMP__, set SOURCE_DATE_EPOCH`},
	}},
	{BuildID, "an identity that the linker derives from the rest, or chooses at random", []Fix{
		{"", "--build-id=sha1 instead of uuid; or -Wl,--build-id=none; go build -ldflags=-buildid="},
		{"go", "go build -trimpath -ldflags=-buildid="},
		{"pe", "link with /Brepro"},
		{"macho", "ld -no_uuid (clang: -Wl,-no_uuid)"},
		{"pdf", `set SOURCE_DATE_EPOCH; qpdf --deterministic-id; in TeX \pdftrailerid{}`},
	}},
	{Path, "the path of the working directory or of a temporary file", []Fix{
		{"", "write paths relative to the working directory, and no names of temporary files"},
		{"elf", "-ffile-prefix-map=$PWD=. (gcc, clang); go build -trimpath; rustc --remap-path-prefix; with gcc -flto: PWD=/proc/self/cwd gcc"},
		{"gcov", "PWD=/proc/self/cwd gcc, and sources by relative paths"},
		{"go", "go build -trimpath"},
		{"go object", "go build -trimpath"},
		{"pyc", "python -m compileall -d or -s, so that the path in it is relative"},
	}},
	{Owner, "the user or the group, in number or name", []Fix{
		{"", "leave user and group out"},
		{"ar", "write the archive with the D modifier: ar crD"},
		{"tar", "tar --owner=0 --group=0 --numeric-owner"},
		{"cpio", "cpio -R 0:0"},
		{"zip", "zip -X"},
	}},
	{Mode, "permissions of files as the umask left them", []Fix{
		{"", "set modes: chmod, install -m, or umask 022 first"},
		{"ar", "write the archive with the D modifier: ar crD"},
		{"tar", "tar --mode=u+rwX,go+rX,go-w"},
		{"zip", "chmod the files first; zip -X does not leave modes out"},
	}},
	{MemberOrder, "the order in which a directory was read", []Fix{
		{"", "sort the names of files: LC_ALL=C sort, sorted(os.listdir(...))"},
		{"elf", "give the linker its objects in sorted order"},
		{"ar", "give ar its members in sorted order: wildcards of a shell are, those of find are not"},
		{"tar", "tar --sort=name"},
		{"cpio", "find . | LC_ALL=C sort | cpio -o --reproducible"},
		{"zip", "find . -type f | LC_ALL=C sort | zip -X -@ FILE"},
		{"jar", "give jar its files in sorted order: jar --file F @LIST"},
	}},
	{Locale, "the order or the language of texts in the locale", []Fix{{"", "set LC_ALL=C (or C.UTF-8) for the command"}}},
	{Zone, "the time zone", []Fix{
		{"", "set TZ=UTC for the command, or write times in UTC"},
		{"zip", "set TZ=UTC: zip keeps local times"},
	}},
	{HashSeed, "the order of a hash table, which is seeded at random", []Fix{
		{"", "iterate in sorted order; for Python set PYTHONHASHSEED=0, for Perl PERL_HASH_SEED=0"},
		{"json", "write keys in sorted order: json.dumps(..., sort_keys=True), jq -S"},
		{"pyc", "set PYTHONHASHSEED=0 when compiling"},
	}},
	{Random, "bytes asked of the kernel: UUIDs, salts, names", []Fix{
		{"", "derive the value from the inputs, or seed the generator with a constant (-frandom-seed for gcc, PYTHONHASHSEED=0 for Python)"},
		{"elf", "gcc -frandom-seed=FILE, with the name of the source"},
		{"pdf", "state xmpMM:DocumentID and xmpMM:InstanceID instead of having them made"},
	}},
	{Hostname, "the name of the host", []Fix{{"", "leave the name of the host out"}}},
	{ProcessID, "the number of a process", []Fix{{"", "leave numbers of processes out, also of names of temporary files"}}},
	{Address, "a pointer, which lies where address space randomization put it", []Fix{{"", "print names or indexes instead of pointers, and do not sort by pointers"}}},
	{Parallel, "which of several processes or threads came first", []Fix{{"", "collect results in the order of the tasks, not of their ends; or run one at a time"}}},
	{Processors, "the number of processors", []Fix{{"", "give the number of jobs or pieces in the command, not by the machine's processors"}}},
	{Environment, "a variable of the environment that is none of the command's", []Fix{{"", "leave the environment out, or start the command with env -i"}}},
	{Uptime, "a monotonic clock, or the time since boot", []Fix{{"", "leave it out"}}},
}

// FixFor returns what would end differences of a cause in things of a format, "" if nothing is known.
func FixFor(cause Cause, format string) string {
	for _, row := range Causes {
		if row.Cause != cause {
			continue
		}
		for _, f := range row.Fixes {
			if f.Format == format {
				return f.Text
			}
		}
		return row.Fixes[0].Text
	}
	return ""
}

// CausesTable returns the table of the causes in Markdown.
func CausesTable() string {
	var b strings.Builder
	b.WriteString("| Cause | Meaning | In | What ends it |\n|---|---|---|---|\n")
	for _, row := range Causes {
		cause, meaning := "`"+string(row.Cause)+"`", row.Meaning
		for _, f := range row.Fixes {
			format := f.Format
			if format == "" {
				format = "all"
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", cause, meaning, format, strings.ReplaceAll(f.Text, "|", `\|`))
			cause, meaning = "", ""
		}
	}
	return b.String()
}
