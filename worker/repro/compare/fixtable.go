// SPDX-License-Identifier: Apache-2.0

package compare

import "slices"

// Values that fixes set.
const (
	epoch   = "SOURCE_DATE_EPOCH=1577836800"
	sameID  = "00000000-0000-4000-8000-000000000001"
	tarOpts = "TAR_OPTIONS="
)

const (
	compilers = "gcc g++ cc c++ cc1 cc1plus clang clang++"
	linkers   = compilers + " ld ld.bfd ld.gold gold ld.lld lld"
)

// fixes are all fixes. Each cause has one for any format and any program first. Of equally specific ones the first
// wins.
var fixes = slices.Concat(commandFixes, sourceFixes)

// commandFixes change the environment of a program, its arguments, or what precedes it.
var commandFixes = []Fix{
	{
		Cause: Timestamp, Text: "take times from SOURCE_DATE_EPOCH, in UTC, or omit them",
		Marks: []string{"SOURCE_DATE_EPOCH"},
	},
	{Cause: Timestamp, Text: "set SOURCE_DATE_EPOCH, in seconds since 1970", Env: []string{epoch}},
	{
		Cause: Timestamp, Programs: "date", Text: "date -u -d @$SOURCE_DATE_EPOCH",
		Args: []string{"-u", "-d", "@1577836800"}, Marks: []string{"date -d", "date -u -d"},
	},
	{Cause: Timestamp, Programs: "ls", Text: "ls --time-style=+", Args: []string{"--time-style=+"}},
	{Cause: Timestamp, Format: "ar", Programs: "ar ranlib", Text: "use the D modifier: ar crD; ranlib -D", Swap: arD},
	{
		Cause: Timestamp, Format: "tar", Programs: "tar",
		Text:  "tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --pax-option=delete=atime,delete=ctime",
		Env:   []string{tarOpts + "--sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --pax-option=delete=atime,delete=ctime"},
		Marks: []string{"--mtime"},
	},
	{
		Cause: Timestamp, Format: "tar", Programs: "tar", Text: "tar --mtime=@0", Env: []string{tarOpts + "--mtime=@0"},
		Marks: []string{"--mtime"},
	},
	{
		Cause: Timestamp, Format: "tar", Programs: "git",
		Text: "git archive of a commit with a fixed date instead of a tree, or --mtime (git 2.41 and later)",
		Env:  gitFields,
		Swap: [2]string{`\$\(git(\s+)write-tree\)`, "$$(git commit-tree -m tree $$(git${1}write-tree))"},
	},
	{
		Cause: Timestamp, Format: "zip", Programs: "zip",
		Text: "set the files' times first (touch -d @315532800 FILE), and omit other times: TZ=UTC zip -X",
		Swap: touched,
	},
	{
		Cause: Timestamp, Format: "zip", Programs: "python",
		Text: "in Python zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))", Marks: []string{"date_time="},
	},
	{
		Cause: Timestamp, Format: "jar", Programs: "jar", Text: "jar --date=1980-01-01T00:00:02Z (JDK 17 and later)",
		Args: []string{"--date=1980-01-01T00:00:02Z"},
	},
	{
		Cause: Timestamp, Format: "jar", Programs: "jar", Text: "jar cf FILE --date=1980-01-01T00:00:02Z (JDK 17 and later)",
		Swap:  [2]string{`\bjar(\s+)(-?)([a-z]*[cu][a-z]*)(\s+\S+)`, "jar$1$2$3$4 --date=1980-01-01T00:00:02Z"},
		Marks: []string{"--date"},
	},
	{
		Cause: Timestamp, Format: "jmod", Programs: "jmod",
		Text:  "jmod create --date 1980-01-01T00:00:02Z (JDK 17 and later)",
		Swap:  [2]string{`\bjmod(\s+)create\b`, "jmod${1}create${1}--date=1980-01-01T00:00:02Z"},
		Marks: []string{"--date"},
	},
	{Cause: Timestamp, Format: "wheel", Programs: "python pip", Text: "set SOURCE_DATE_EPOCH", Env: []string{epoch}},
	{
		Cause: Timestamp, Format: "epub",
		Text:  "set the files' times first (touch -d @315532800 FILE), zip with TZ=UTC zip -X, and set dcterms:modified",
		Marks: []string{"touch -d"},
	},
	{Cause: Timestamp, Format: "gzip", Programs: "gzip pigz", Text: "gzip -n", Args: []string{"-n"}},
	{Cause: Timestamp, Format: "cpio", Text: "touch -d @0 the files first; cpio --reproducible"},
	{
		Cause: Timestamp, Format: "elf", Text: "omit the time, or take it from SOURCE_DATE_EPOCH, in UTC",
		Marks: []string{"SOURCE_DATE_EPOCH"},
	},
	{
		Cause: Timestamp, Format: "gcov", Programs: compilers,
		Text: "gcc -frandom-seed=FILE, with the name of the source file", Args: []string{"-frandom-seed=1"},
	},
	{
		Cause: Timestamp, Format: "go", Text: "go build -buildvcs=false, and no time in -ldflags=-X",
		Marks: []string{"-buildvcs=false"},
	},
	{
		Cause: Timestamp, Format: "pe", Text: "link with /Brepro, or with GNU ld --no-insert-timestamp",
		Marks: []string{"/Brepro", "--no-insert-timestamp"},
	},
	{
		Cause: Timestamp, Format: "png", Programs: "convert convert-im6.q16 magick",
		Text: "magick -define png:exclude-chunks=date,time",
		Args: []string{"-define", "png:exclude-chunks=date,time"}, Marks: []string{"png:exclude-chunks"},
	},
	{
		Cause: Timestamp, Format: "pdf", Text: "set SOURCE_DATE_EPOCH; in TeX also FORCE_SOURCE_DATE=1",
		Env: []string{epoch, "FORCE_SOURCE_DATE=1"},
	},
	{
		Cause: Timestamp, Format: "pyc", Programs: "python",
		Text: "set SOURCE_DATE_EPOCH: Python then writes hashes of the sources", Env: []string{epoch},
	},
	{
		Cause: Timestamp, Format: "pyc", Text: "python -m compileall --invalidation-mode unchecked-hash",
		Swap:  [2]string{`-m(\s+)compileall\b`, "-m${1}compileall${1}--invalidation-mode=unchecked-hash"},
		Marks: []string{"--invalidation-mode"},
	},
	{
		Cause: Timestamp, Format: "deb", Programs: "dpkg-deb dpkg-buildpackage",
		Text: "set SOURCE_DATE_EPOCH for dpkg-deb", Env: []string{epoch},
	},
	{
		Cause: Timestamp, Format: "rpm", Programs: "rpmbuild rpm",
		Text:  `set SOURCE_DATE_EPOCH; rpmbuild -D "use_source_date_epoch_as_buildtime 1" -D "clamp_mtime_to_source_date_epoch 1"`,
		Env:   []string{epoch},
		Args:  []string{"-D", "use_source_date_epoch_as_buildtime 1", "-D", "clamp_mtime_to_source_date_epoch 1"},
		Marks: []string{"use_source_date_epoch_as_buildtime"},
	},
	{
		Cause: Timestamp, Format: "ext4", Programs: mke2fs,
		Text: "E2FSPROGS_FAKE_TIME=1577836800, or SOURCE_DATE_EPOCH from e2fsprogs 1.47.1",
		Env:  []string{"E2FSPROGS_FAKE_TIME=1577836800", epoch},
	},
	{
		Cause: Timestamp, Format: "fat", Programs: "mkfs.fat mkfs.vfat",
		Text: "mkfs.fat --invariant, or set SOURCE_DATE_EPOCH", Args: []string{"--invariant"},
	},
	{
		Cause: Timestamp, Format: "iso9660", Programs: "genisoimage mkisofs xorriso xorrisofs",
		Text: "set SOURCE_DATE_EPOCH; xorriso also --modification-date=2020010100000000 and --set_all_file_dates",
		Env:  []string{epoch},
	},
	{
		Cause: Timestamp, Format: "squashfs", Programs: "mksquashfs",
		Text: "set SOURCE_DATE_EPOCH, or mksquashfs -mkfs-time 0 -all-time 0", Env: []string{epoch},
	},
	{Cause: Timestamp, Programs: "javadoc", Text: "javadoc -notimestamp", Args: []string{"-notimestamp"}},
	{
		Cause: Timestamp, Programs: "xgettext", Text: "xgettext --omit-header, or replace POT-Creation-Date",
		Args: []string{"--omit-header"},
	},
	{
		Cause: Timestamp, Programs: "gpg gpg2", Text: "gpg --faked-system-time 20200101T000000!",
		Args: []string{"--faked-system-time=20200101T000000!"},
	},
	{
		Cause: Timestamp, Programs: "git", Text: "set GIT_AUTHOR_DATE and GIT_COMMITTER_DATE",
		Env: gitFields[:2],
	},
	{
		Cause: Timestamp, Programs: "openssl",
		Text:  "set the certificate's dates: openssl x509 -not_before and -not_after, or openssl ca -startdate and -enddate",
		Marks: []string{"-not_before", "-startdate"},
	},
	{
		Cause: Timestamp, Programs: "python",
		Text:  "in Python take the time from os.environ['SOURCE_DATE_EPOCH']; setuptools' sdist: set SOURCE_DATE_EPOCH and repack with tar --mtime",
		Marks: []string{"SOURCE_DATE_EPOCH"},
	},
	{Cause: Timestamp, Format: "tree", Text: "omit the time from the file name"},

	{
		Cause: BuildDate,
		Text:  `-Wno-builtin-macro-redefined -D__DATE__='"redacted"' -D__TIME__='"redacted"' -D__TIMESTAMP__='"redacted"'; or set SOURCE_DATE_EPOCH, except for __TIMESTAMP__`,
		Marks: []string{"-D__DATE__"},
	},
	{Cause: BuildDate, Programs: compilers, Text: "set SOURCE_DATE_EPOCH, in seconds since 1970", Env: []string{epoch}},

	{
		Cause: BuildDate, Programs: compilers,
		Text: `-Wno-builtin-macro-redefined -D__DATE__='"redacted"' -D__TIME__='"redacted"' -D__TIMESTAMP__='"redacted"'`,
		Args: []string{"-Wno-builtin-macro-redefined", `-D__DATE__="redacted"`, `-D__TIME__="redacted"`, `-D__TIMESTAMP__="redacted"`},
	},
	{Cause: Duration, Text: "omit the duration, or write it to a file that is not an output"},

	{
		Cause: BuildID, Text: "-Wl,--build-id=sha1 instead of uuid, or -Wl,--build-id=none; go build -ldflags=-buildid=",
		Marks: []string{"--build-id=none"},
	},
	{Cause: BuildID, Text: "--build-id=sha1 instead of uuid", Swap: [2]string{`--build-id=uuid`, `--build-id=sha1`}},
	{Cause: BuildID, Format: "go", Text: "go build -trimpath -ldflags=-buildid="},
	{Cause: BuildID, Format: "macho", Text: "ld -no_uuid (clang: -Wl,-no_uuid)"},

	{Cause: Path, Text: "write paths relative to the working directory, and no names of temporary files"},
	{Cause: Path, Text: "relative paths instead of $PWD/...", Swap: [2]string{`\$\{?PWD\}?/`, "./"}},
	{
		Cause: Path, Programs: "ctags ctags-universal", Text: "ctags --pseudo-tags=-TAG_PROC_CWD",
		Args: []string{"--pseudo-tags=-TAG_PROC_CWD"},
	},
	{
		Cause: Path, Format: "elf", Programs: "rustc", Text: "rustc --remap-path-prefix=$PWD=.",
		Args: []string{"--remap-path-prefix=$PWD=."},
	},
	{
		Cause: Path, Format: "elf", Programs: compilers,
		Text: "-ffile-prefix-map=$PWD=. (gcc, clang); with gcc -flto: PWD=/proc/self/cwd gcc",
		Args: []string{"-ffile-prefix-map=$PWD=."}, Marks: []string{"-ffile-prefix-map"},
	},
	{
		Cause: Path, Format: "elf", Programs: compilers, Text: "PWD=/proc/self/cwd gcc, with relative source paths",
		Env: []string{"PWD=/proc/self/cwd"},
	},
	{
		Cause: Path, Format: "elf", Programs: "as", Text: "as --debug-prefix-map=$PWD=.",
		Args: []string{"--debug-prefix-map=$PWD=."},
	},
	{
		Cause: Path, Format: "elf",
		Text: "-ffile-prefix-map=$PWD=. (gcc, clang); go build -trimpath; rustc --remap-path-prefix; with gcc -flto: PWD=/proc/self/cwd gcc",
	},
	{
		Cause: Path, Format: "gcov", Text: "PWD=/proc/self/cwd gcc, with relative source paths",
		Env: []string{"PWD=/proc/self/cwd"},
	},
	{
		Cause: Path, Format: "go", Text: "go build -trimpath", Env: []string{"GOFLAGS=-trimpath"},
		Marks: []string{"-trimpath"},
	},
	{
		Cause: Path, Format: "go object", Text: "go build -trimpath", Env: []string{"GOFLAGS=-trimpath"},
		Marks: []string{"-trimpath"},
	},
	{
		Cause: Path, Format: "pyc", Text: "python -m compileall with -d or -s, for a relative path",
		Swap: [2]string{`-m(\s+)compileall\b`, "-m${1}compileall${1}-d${1}."},
	},
	{Cause: Path, Programs: compilers, Text: "-ffile-prefix-map=$PWD=.", Args: []string{"-ffile-prefix-map=$PWD=."}},

	{Cause: Owner, Text: "omit user and group"},
	{Cause: Owner, Format: "ar", Programs: "ar", Text: "use the D modifier: ar crD", Swap: arD},
	{
		Cause: Owner, Format: "tar", Programs: "tar", Text: "tar --owner=0 --group=0 --numeric-owner",
		Env: []string{tarOpts + "--owner=0 --group=0 --numeric-owner"}, Marks: []string{"--owner"},
	},
	{
		Cause: Owner, Format: "cpio", Programs: "cpio", Text: "cpio -R 0:0", Args: []string{"-R", "0:0"},
		Marks: []string{"-R", "--owner"},
	},
	{
		Cause: Owner, Format: "zip", Programs: "zip", Text: "zip -X", Env: []string{"ZIPOPT=-X"},
		Marks: []string{"zip -X"},
	},
	{
		Cause: Owner, Format: "deb", Programs: "dpkg-deb", Text: "dpkg-deb --root-owner-group",
		Args: []string{"--root-owner-group"},
	},
	{Cause: Owner, Format: "rpm", Programs: "rpmbuild rpm", Text: "%defattr(-,root,root) in the spec file"},
	{
		Cause: Owner, Format: "ext4", Programs: mke2fs,
		Text: "mke2fs -E root_owner=0:0, and chown the files of -d first", Args: []string{"-E", "root_owner=0:0"},
	},
	{Cause: Owner, Format: "squashfs", Programs: "mksquashfs", Text: "mksquashfs -all-root"},
	{Cause: Owner, Programs: "ls", Text: "ls -go", Args: []string{"-go"}},
	{
		Cause: Owner, Programs: "git",
		Text: "set GIT_AUTHOR_NAME, GIT_AUTHOR_EMAIL, GIT_COMMITTER_NAME and GIT_COMMITTER_EMAIL",
		Env:  gitFields[2:],
	},

	{Cause: Mode, Text: "set modes: chmod, install -m, or umask 022 first"},
	{Cause: Mode, Text: "umask 022 first", Before: "umask 022", Marks: []string{"umask 0"}},
	{Cause: Mode, Format: "ar", Programs: "ar", Text: "use the D modifier: ar crD", Swap: arD},
	{
		Cause: Mode, Format: "tar", Programs: "tar", Text: "tar --mode=u+rwX,go+rX,go-w",
		Env: []string{tarOpts + "--mode=u+rwX,go+rX,go-w"}, Marks: []string{"--mode="},
	},
	{
		Cause: Mode, Format: "zip", Text: "chmod the files first; zip -X keeps modes", Before: "umask 022",
		Marks: []string{"umask 0"},
	},

	{Cause: MemberOrder, Text: "sort file names: LC_ALL=C sort, sorted(os.listdir(...))"},
	{Cause: MemberOrder, Format: "elf", Text: "give the linker its objects in sorted order"},
	{
		Cause: MemberOrder, Format: "ar",
		Text: "give ar its members in sorted order: shell wildcards are sorted, the output of find is not",
	},
	{
		Cause: MemberOrder, Format: "ar", Programs: "find", Text: "$(find ... | LC_ALL=C sort)",
		Swap: [2]string{`\$\((find\s[^|;)\n]*)\)`, "$$($1 | LC_ALL=C sort)"},
	},
	{
		Cause: MemberOrder, Format: "tar", Programs: "tar", Text: "tar --sort=name",
		Env: []string{tarOpts + "--sort=name"}, Marks: []string{"--sort"},
	},
	{Cause: MemberOrder, Format: "cpio", Text: "find . | LC_ALL=C sort | cpio -o --reproducible", Swap: findSorted},
	{Cause: MemberOrder, Format: "zip", Text: "find . -type f | LC_ALL=C sort | zip -X -@ FILE", Swap: findSorted},
	{Cause: MemberOrder, Format: "jar", Text: "give jar its files in sorted order: jar --file F @LIST"},
	{Cause: MemberOrder, Programs: "find", Text: "find ... | LC_ALL=C sort", Swap: findSorted, Marks: []string{"sort"}},
	{
		Cause: MemberOrder, Programs: "ls", Text: "ls without -U, with LC_ALL=C", Env: []string{"LC_ALL=C"},
		Swap: [2]string{`\bls(\s+-\w*)[Uf]`, "ls${1}1"},
	},

	{Cause: Locale, Text: "set LC_ALL=C (or C.UTF-8) for the command", Env: []string{"LC_ALL=C"}},
	{Cause: Zone, Text: "set TZ=UTC for the command, or write times in UTC", Env: []string{"TZ=UTC"}},
	{Cause: Zone, Format: "zip", Text: "set TZ=UTC: zip keeps local times", Env: []string{"TZ=UTC"}},

	{Cause: HashSeed, Text: "iterate in sorted order; for Python set PYTHONHASHSEED=0, for Perl PERL_HASH_SEED=0"},
	{
		Cause: HashSeed, Format: "json", Text: "write keys in sorted order: json.dumps(..., sort_keys=True), jq -S",
		Marks: []string{"sort_keys", "jq -S"},
	},
	{Cause: HashSeed, Format: "pyc", Text: "set PYTHONHASHSEED=0 when compiling", Env: []string{"PYTHONHASHSEED=0"}},
	{
		Cause: HashSeed, Programs: "python", Text: "iterate in sorted order, or set PYTHONHASHSEED=0",
		Env: []string{"PYTHONHASHSEED=0"},
	},
	{Cause: HashSeed, Programs: "shuf", Text: "shuf --random-source=FILE", Args: []string{"--random-source=/dev/zero"}},
	{
		Cause: HashSeed, Programs: "perl",
		Text: "iterate in sorted order, or set PERL_HASH_SEED=0 and PERL_PERTURB_KEYS=0",
		Env:  []string{"PERL_HASH_SEED=0", "PERL_PERTURB_KEYS=0"},
	},

	{Cause: Random, Text: "derive the value from the inputs, or seed the generator with a constant"},
	{
		Cause: Random, Format: "elf", Programs: compilers,
		Text: "gcc -frandom-seed=FILE, with the name of the source file", Args: []string{"-frandom-seed=1"},
	},
	{
		Cause: Random, Format: "pdf",
		Text: `set SOURCE_DATE_EPOCH; qpdf --deterministic-id; in TeX \pdftrailerid{}; set xmpMM:DocumentID and xmpMM:InstanceID`,
		Env:  []string{epoch},
	},
	{
		Cause: Random, Format: "ext4", Programs: mke2fs, Text: "mke2fs -U UUID -E hash_seed=UUID",
		Args: []string{"-U", sameID, "-E", "hash_seed=" + sameID}, Marks: []string{"hash_seed="},
	},
	{
		Cause: Random, Format: "fat", Programs: "mkfs.fat mkfs.vfat", Text: "mkfs.fat -i ID",
		Args: []string{"-i", "12345678"},
	},
	{
		Cause: Random, Format: "swap", Programs: "mkswap", Text: "mkswap -U UUID", Args: []string{"-U", sameID},
		Marks: []string{" -U "},
	},
	{
		Cause: Random, Programs: "python",
		Text:  "derive the value from the inputs: uuid.uuid5, random.Random(SEED), PYTHONHASHSEED=0",
		Marks: []string{"uuid5"},
	},
	{
		Cause: Random, Programs: compilers, Text: "gcc -frandom-seed=FILE, with the name of the source file",
		Args: []string{"-frandom-seed=1"},
	},
	{
		Cause: Random, Programs: "openssl ssh-keygen gpg gpg2",
		Text: "keys, salts and signatures are random: make them an input",
	},

	{Cause: Compressed, Text: "decompress to compare"},
	{Cause: Hostname, Text: "omit the host name"},
	{
		Cause: Hostname, Format: "rpm", Programs: "rpmbuild rpm", Text: `rpmbuild -D "_buildhost localhost"`,
		Args: []string{"-D", "_buildhost localhost"}, Marks: []string{"_buildhost"},
	},
	{Cause: ProcessID, Text: "omit process IDs, also from names of temporary files"},
	{Cause: Address, Text: "print names or indexes instead of pointers, and do not sort by pointers"},
	{Cause: Parallel, Text: "collect results in the order of the tasks, not of their completion; or run one at a time"},
	{
		Cause: Processors,
		Text:  "fix the number of jobs or parts in the command instead of using the number of processors",
	},
	{
		Cause: Processors, Programs: "nproc", Text: "set OMP_NUM_THREADS, which nproc obeys",
		Env: []string{"OMP_NUM_THREADS=1"},
	},
	{Cause: Environment, Text: "omit the environment, or start the command with env -i"},
	{Cause: Uptime, Text: "omit times since boot"},
	{Cause: PersistentWorker, Text: "have the tool keep nothing between requests, or give its actions a profile without persistent_workers"},
}

// mke2fs are the names of mke2fs(8).
const mke2fs = "mke2fs mkfs.ext2 mkfs.ext3 mkfs.ext4"

// gitFields are what a commit takes from its environment: first dates, then persons.
var gitFields = []string{
	"GIT_AUTHOR_DATE=1577836800 +0000", "GIT_COMMITTER_DATE=1577836800 +0000",
	"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@localhost", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@localhost",
}
