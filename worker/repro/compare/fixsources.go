// SPDX-License-Identifier: Apache-2.0

package compare

// Parts of the expressions in sourceFixes.
const (
	pythonEpoch = `int(__import__("os").environ["SOURCE_DATE_EPOCH"])`
	tclEpoch    = `$$::env(SOURCE_DATE_EPOCH)`
	perlEpoch   = `$$ENV{SOURCE_DATE_EPOCH}`
)

// sourceFixes change what a program does rather than how it is called: a script that the command executes, or a program
// in such a script.
var sourceFixes = []Fix{
	{
		Cause: Timestamp, Programs: "awk gawk mawk", Text: "srand with a constant in awk",
		Swap: [2]string{`\bsrand\(\)`, "srand(1)"},
	},
	{
		Cause: Timestamp, Programs: "perl", Text: "in Perl gmtime($ENV{SOURCE_DATE_EPOCH}) instead of gmtime or localtime",
		Env: []string{epoch}, Swap: [2]string{`\b(?:gm|local)time(\s*[;,)])`, `gmtime(` + perlEpoch + `)$1`},
	},
	{
		Cause: Timestamp, Programs: "perl", Text: "in Perl $ENV{SOURCE_DATE_EPOCH} instead of time",
		Env: []string{epoch}, Swap: [2]string{`([=,(]\s*)time(\s*[;,)])`, `${1}` + perlEpoch + `$2`},
	},
	{
		Cause: Timestamp, Programs: "python", Text: "in Python int(os.environ['SOURCE_DATE_EPOCH']) instead of time.time()",
		Env: []string{epoch}, Swap: [2]string{`\btime\.time\(\)`, pythonEpoch},
	},
	{
		Cause: Timestamp, Programs: "python",
		Text: "in Python datetime.utcfromtimestamp(int(os.environ['SOURCE_DATE_EPOCH'])) instead of now()",
		Env:  []string{epoch},
		Swap: [2]string{`\bdatetime\.(?:utcnow|now|today)\(\)`, `datetime.utcfromtimestamp(` + pythonEpoch + `)`},
	},
	{
		Cause: Timestamp, Programs: "node", Text: "in JavaScript new Date(process.env.SOURCE_DATE_EPOCH * 1000)",
		Env: []string{epoch}, Swap: [2]string{`\bnew Date\(\)`, `new Date(process.env.SOURCE_DATE_EPOCH * 1000)`},
	},
	{
		Cause: Timestamp, Programs: "jq", Text: "in jq (env.SOURCE_DATE_EPOCH | tonumber) instead of now",
		Env: []string{epoch}, Swap: [2]string{`(\bjq\b[^\n]*)\bnow\b`, `${1}(env.SOURCE_DATE_EPOCH | tonumber)`},
	},
	{
		Cause: Timestamp, Programs: "tclsh", Text: "in Tcl $::env(SOURCE_DATE_EPOCH) instead of clock seconds",
		Env: []string{epoch}, Swap: [2]string{`\[clock (?:milli|micro)?seconds\]`, tclEpoch},
	},
	{
		Cause: Timestamp, Programs: "sqlite3", Text: "in SQL a constant instead of CURRENT_TIMESTAMP",
		Swap: [2]string{`(?i)\bcurrent_timestamp\b`, `'2020-01-01 00:00:00'`},
	},
	{
		Cause: Timestamp, Format: "gzip", Programs: "python",
		Text:  "in Python gzip.GzipFile(..., mtime=0)",
		Swap:  [2]string{`\bgzip\.open\(([^(),]+, *["']wb["'])`, `gzip.GzipFile($1, mtime=0`},
		Marks: []string{"mtime="},
	},
	{
		Cause: Timestamp, Format: "pyc", Programs: "python",
		Text: "in Python PycInvalidationMode.UNCHECKED_HASH instead of TIMESTAMP",
		Swap: [2]string{`\bPycInvalidationMode\.TIMESTAMP\b`, `PycInvalidationMode.UNCHECKED_HASH`},
	},
	{
		Cause: Timestamp, Format: "tar", Programs: "python",
		Text: "in Python tarfile: add(..., filter=...) with a function that sets mtime = 0",
		Swap: tarFilter(`mtime=0`), Marks: []string{"filter="},
	},
	{
		Cause: Timestamp, Format: "zip", Programs: "python",
		Text: "set the files' times first: touch -d @315532800 FILE, with TZ=UTC", Env: []string{"TZ=UTC"},
		Swap: touchedForPython,
	},
	{
		Cause: Timestamp, Format: "cpio", Programs: "python", Text: "set the files' times first: touch -d @315532800 FILE",
		Swap: touchedForPython,
	},

	{
		Cause: Path, Programs: "mktemp", Text: "a fixed name in a directory of the action instead of mktemp",
		Swap: [2]string{`\$\(mktemp\)`, `$$(touch /tmp/tmp.fixed && echo /tmp/tmp.fixed)`},
	},
	{
		Cause: Path, Text: "set PWD=/proc/self/cwd, which shells and compilers report as the current directory",
		Env: []string{"PWD=/proc/self/cwd"},
	},

	{
		Cause: Owner, Programs: "id whoami logname", Text: "a constant instead of id, whoami or logname",
		Swap: insteadOf(`id -[ugn]+|whoami|logname`, "nobody"),
	},
	{
		Cause: Owner, Format: "tar", Programs: "python",
		Text: "in Python tarfile: add(..., filter=...) with a function that sets uid, gid, uname and gname",
		Swap: tarFilter(`uid=0, gid=0, uname="", gname=""`), Marks: []string{"filter="},
	},
	{
		Cause: Owner, Text: "fakeroot COMMAND, for which root owns all files", Wrap: []string{"fakeroot"},
		Marks: []string{"fakeroot"},
	},

	{
		Cause: MemberOrder, Programs: "python", Text: "in Python sorted(os.listdir(...))",
		Swap: [2]string{`\bos\.listdir\(([^()]*)\)`, `sorted(os.listdir($1))`}, Marks: []string{"sorted(os.listdir"},
	},
	{Cause: HashSeed, Text: "sort the lines: ... | LC_ALL=C sort > FILE", Swap: linesSorted, Marks: []string{"sort >"}},
	{Cause: Parallel, Text: "sort the lines: ... | LC_ALL=C sort > FILE", Swap: linesSorted, Marks: []string{"sort >"}},

	{
		Cause: Random, Programs: "bash", Text: "seed the shell's random numbers: RANDOM=1",
		Swap: [2]string{`(\bbash\s+-\w*c\s+["'])`, `${1}RANDOM=1; `}, Marks: []string{"RANDOM="},
	},
	{
		Cause: Random, Programs: "python", Text: "in Python uuid.uuid5 of a name instead of uuid.uuid4",
		Swap: [2]string{`\buuid\.uuid[14]\(\)`, `uuid.uuid5(uuid.NAMESPACE_URL, "name")`},
	},
	{
		Cause: Random, Programs: "python", Text: "in Python random.seed with a constant",
		Swap: [2]string{`\bimport random\b`, `import random; random.seed(1)`}, Marks: []string{"random.seed("},
	},
	{
		Cause: Random, Programs: "openssl", Text: "openssl passwd -salt SALT",
		Swap: [2]string{`\bopenssl(\s+)passwd\b`, `openssl${1}passwd${1}-salt${1}constant`}, Marks: []string{"-salt"},
	},
	{
		Cause: Random, Programs: "sqlite3", Text: "in SQL a constant, such as zeroblob(N), instead of randomblob(N)",
		Swap: [2]string{`(?i)\brandomblob\(`, `zeroblob(`},
	},
	{
		Cause: Random, Text: "an input instead of /dev/urandom, unless it is to be a secret",
		Swap: [2]string{`/dev/u?random\b`, `/dev/zero`},
	},

	{
		Cause: Hostname, Programs: "hostname uname", Text: "a constant instead of hostname or uname -n",
		Swap: insteadOf(`hostname(?: -[fs])?|uname -n`, "localhost"),
	},
	{
		Cause: Hostname, Programs: "python", Text: "in Python a constant instead of socket.gethostname()",
		Swap: [2]string{`\bsocket\.gethostname\(\)`, `"localhost"`},
	},
	{
		Cause: ProcessID, Text: "a constant instead of $$, also in names of temporary files", Swap: [2]string{`\$\$`, `1`},
	},
	{
		Cause: Address, Text: "setarch -R COMMAND, which disables address space layout randomization",
		Wrap: []string{"setarch", "-R"}, Marks: []string{"setarch"},
	},
	{Cause: Environment, Programs: "env", Text: "env -i", Args: []string{"-i"}},
	{
		Cause: Environment, Text: "set HOME and PATH for the command",
		Env: []string{"HOME=/tmp", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	},
}

var (
	// arD replaces the modifier U of ar(1).
	arD = [2]string{`\b(ar\s+-?[a-zA-CE-TV-Z]*)U`, "${1}D"}
	// touched sets the times of all files below the working directory before zip(1) runs.
	touched = [2]string{`(?m)(^|[;&]\s*)((?:\w+=\S*\s+)*)zip\b`, "${1}find . -type f -exec touch -d @315532800 {} +; ${2}TZ=UTC zip -X"}
	// findSorted sorts what find(1) writes to a pipe.
	findSorted = [2]string{`(\bfind\s[^|\n;]*?)\s*\|`, "$1 | LC_ALL=C sort |"}
	// touchedForPython sets the times of all files below the working directory before a Python program runs.
	touchedForPython = [2]string{
		`(?m)(^|[;&]\s*)((?:\w+=\S*\s+)*(?:/\S*/)?python[0-9.]*\s)`,
		"${1}find . -type f -exec touch -d @315532800 {} +; ${2}",
	}
	// linesSorted sorts what a command of a script writes to a file.
	linesSorted = [2]string{`(?m)[ \t](2?)>[ \t]*([\w./-]+)[ \t]*$`, " ${1}>&1 | LC_ALL=C sort > $2"}
)

// insteadOf replaces commands of a script, an expression, by one that writes a constant.
func insteadOf(commands, constant string) [2]string {
	return [2]string{
		"(^|[\n;&|(`]\\s*)(?:" + commands + ")(\\s*(?:[|;&)>`\n]|$))", "${1}echo " + constant + "${2}",
	}
}

// tarFilter sets fields of the members that Python's tarfile adds.
func tarFilter(fields string) [2]string {
	return [2]string{
		`\.add\(([^()\n]+)\)`,
		`.add($1, filter=lambda m: [setattr(m, *kv) for kv in dict(` + fields + `).items()] and m)`,
	}
}
