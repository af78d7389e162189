// SPDX-License-Identifier: Apache-2.0

package compare

// A CauseRow explains a Cause. docs/causes.md contains the table.
type CauseRow struct {
	Cause Cause
	// Meaning is one line.
	Meaning string
	// Fixes explain how to remove it. The first one, of format "", is for all formats without their own fix.
	Fixes []Fix
}

// A Fix explains in one line how to remove a cause from files of a format, such as "tar".
type Fix struct{ Format, Text string }

// Causes explains all causes, in the order of docs/causes.md. Callers must not change it.
var Causes = []CauseRow{
	{Timestamp, "the time of the run, in a field or a text", []Fix{
		{"", "take times from SOURCE_DATE_EPOCH, in UTC, or omit them"},
		{"ar", "use the D modifier: ar crD; ranlib -D"},
		{"tar", "tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --pax-option=delete=atime,delete=ctime"},
		{"zip", "set the files' times first (touch -d @315532800 FILE), and omit other times: TZ=UTC zip -X"},
		{"jar", "jar --date=1980-01-01T00:00:02Z (JDK 17 and later)"},
		{"gzip", "gzip -n; in Python gzip.GzipFile(..., mtime=0)"},
		{"cpio", "touch -d @0 the files first; cpio --reproducible"},
		{"elf", "omit the time, or take it from SOURCE_DATE_EPOCH, in UTC"},
		{"gcov", "gcc -frandom-seed=FILE, with the name of the source file"},
		{"go", "go build -buildvcs=false, and no time in -ldflags=-X"},
		{"pe", "link with /Brepro, or with GNU ld --no-insert-timestamp"},
		{"png", "magick -define png:exclude-chunks=date,time"},
		{"pdf", "set SOURCE_DATE_EPOCH; in TeX also FORCE_SOURCE_DATE=1"},
		{"pyc", "python -m compileall --invalidation-mode unchecked-hash"},
		{"tree", "omit the time from the file name"},
	}},
	{BuildDate, "the preprocessor's __DATE__, __TIME__ or __TIMESTAMP__", []Fix{
		{"", `-Wno-builtin-macro-redefined -D__DATE__='"redacted"' -D__TIME__='"redacted"' -D__TIMESTAMP__='"redacted"'; or set SOURCE_DATE_EPOCH, except for __TIMESTAMP__`},
	}},
	{BuildID, "an ID that the linker derives from the rest or draws at random", []Fix{
		{"", "-Wl,--build-id=sha1 instead of uuid, or -Wl,--build-id=none; go build -ldflags=-buildid="},
		{"go", "go build -trimpath -ldflags=-buildid="},
		{"macho", "ld -no_uuid (clang: -Wl,-no_uuid)"},
	}},
	{Path, "the path of the working directory or of a temporary file", []Fix{
		{"", "write paths relative to the working directory, and no names of temporary files"},
		{"elf", "-ffile-prefix-map=$PWD=. (gcc, clang); go build -trimpath; rustc --remap-path-prefix; with gcc -flto: PWD=/proc/self/cwd gcc"},
		{"gcov", "PWD=/proc/self/cwd gcc, with relative paths of sources"},
		{"go", "go build -trimpath"},
		{"go object", "go build -trimpath"},
		{"pyc", "python -m compileall with -d or -s, for a relative path"},
	}},
	{Owner, "the user or group, as number or name", []Fix{
		{"", "omit user and group"},
		{"ar", "use the D modifier: ar crD"},
		{"tar", "tar --owner=0 --group=0 --numeric-owner"},
		{"cpio", "cpio -R 0:0"},
		{"zip", "zip -X"},
	}},
	{Mode, "file permissions that depend on the umask", []Fix{
		{"", "set modes: chmod, install -m, or umask 022 first"},
		{"ar", "use the D modifier: ar crD"},
		{"tar", "tar --mode=u+rwX,go+rX,go-w"},
		{"zip", "chmod the files first; zip -X keeps modes"},
	}},
	{MemberOrder, "the order in which a directory was read", []Fix{
		{"", "sort file names: LC_ALL=C sort, sorted(os.listdir(...))"},
		{"elf", "give the linker its objects in sorted order"},
		{"ar", "give ar its members in sorted order: shell wildcards are sorted, the output of find is not"},
		{"tar", "tar --sort=name"},
		{"cpio", "find . | LC_ALL=C sort | cpio -o --reproducible"},
		{"zip", "find . -type f | LC_ALL=C sort | zip -X -@ FILE"},
		{"jar", "give jar its files in sorted order: jar --file F @LIST"},
	}},
	{Locale, "the sort order or language of the locale", []Fix{{"", "set LC_ALL=C (or C.UTF-8) for the command"}}},
	{Zone, "the time zone", []Fix{
		{"", "set TZ=UTC for the command, or write times in UTC"},
		{"zip", "set TZ=UTC: zip keeps local times"},
	}},
	{HashSeed, "the order of a hash table with a random seed", []Fix{
		{"", "iterate in sorted order; for Python set PYTHONHASHSEED=0, for Perl PERL_HASH_SEED=0"},
		{"json", "write keys in sorted order: json.dumps(..., sort_keys=True), jq -S"},
		{"pyc", "set PYTHONHASHSEED=0 when compiling"},
	}},
	{Random, "random bytes: UUIDs, salts, names", []Fix{
		{"", "derive the value from the inputs, or seed the generator with a constant (-frandom-seed for gcc, PYTHONHASHSEED=0 for Python)"},
		{"elf", "gcc -frandom-seed=FILE, with the name of the source file"},
		{"pdf", `set SOURCE_DATE_EPOCH; qpdf --deterministic-id; in TeX \pdftrailerid{}; set xmpMM:DocumentID and xmpMM:InstanceID`},
	}},
	{Hostname, "the host name", []Fix{{"", "omit the host name"}}},
	{ProcessID, "a process ID", []Fix{{"", "omit process IDs, also from names of temporary files"}}},
	{Address, "a pointer, which address space randomization changes", []Fix{{"", "print names or indexes instead of pointers, and do not sort by pointers"}}},
	{Parallel, "a race between processes or threads", []Fix{{"", "collect results in the order of the tasks, not of their completion; or run one at a time"}}},
	{Processors, "the number of processors", []Fix{{"", "fix the number of jobs or parts in the command instead of using the number of processors"}}},
	{Environment, "an environment variable that the command does not set", []Fix{{"", "omit the environment, or start the command with env -i"}}},
	{Uptime, "a monotonic clock or the time since boot", []Fix{{"", "omit it"}}},
}

// FixFor returns how to remove a cause from files of a format, "" for Unknown.
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
