// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// maxLine is how many bytes of a line or a field are split into words.
const maxLine = 4 << 10

// A word is a meaningful piece of text.
type word struct {
	text     string
	at       int
	kind     Cause // why texts of two runs may differ in it, or Unknown
	timeText timeText
	// known means that it is a fact, word for word.
	known bool
}

// isSmallNumber reports whether w is a number so small that it may equal a fact by chance.
func (w *word) isSmallNumber() bool {
	return len(w.text) < 3 && isDigit(w.text[0]) && (w.kind == Processors || w.kind == Owner || w.kind == Environment)
}

// A literal is a text that depends on the run.
type literal struct {
	text string
	kind Cause
}

// A lexer splits texts of one side into words.
type lexer struct {
	facts    *Facts
	literals []literal // longest first
	numbers  map[uint64]Cause
}

// nobody is the user to whom inputs belong by default.
const nobody = 65534

// newLexer returns the lexer of the side with facts f. Only facts that differ from o, those of the other side, count.
func newLexer(f, o *Facts) *lexer {
	l := &lexer{facts: f, numbers: map[uint64]Cause{}}
	known := func(a, b string, kind Cause, least int) {
		if a != b && len(a) >= least {
			l.literals = append(l.literals, literal{a, kind})
		}
	}
	known(f.Root, o.Root, Path, 2)
	known(f.Hostname, o.Hostname, Hostname, 2)
	known(f.User, o.User, Owner, 2)
	known("/home/"+f.User, "/home/"+o.User, Owner, len("/home/")+2) // in case Root is a part of it
	if f.InputOwner == nobody && o.InputOwner != nobody {
		known("nobody", "", Owner, 0)
		known("nogroup", "", Owner, 0)
	}
	known(f.Zone, o.Zone, Zone, 3)
	known(zoneName(f.Zone), zoneName(o.Zone), Zone, 3)
	known(f.Locale, o.Locale, Locale, 2)
	for _, kv := range f.Env {
		key, value, _ := strings.Cut(kv, "=")
		if !slices.Contains(o.Env, kv) {
			known(kv, "", variableCause(key), 2)
			known(value, "", variableCause(key), 4)
		}
	}
	slices.SortStableFunc(l.literals, func(a, b literal) int { return len(b.text) - len(a.text) })
	size := func(f *Facts) (n int) {
		for _, kv := range f.Env {
			n += len(kv) + 1
		}
		return n
	}
	for _, n := range []struct {
		a, b int
		kind Cause
	}{
		{size(f), size(o), Environment},
		{len(f.Env), len(o.Env), Environment},
		{f.CPUs, o.CPUs, Processors},
		{int(f.UID), int(o.UID), Owner},
		{int(f.InputOwner), int(o.InputOwner), Owner},
	} {
		if n.a != n.b {
			l.numbers[uint64(n.a)] = n.kind
		}
	}
	return l
}

// zoneName returns the name that date(1) prints for a TZ in POSIX form, else "".
func zoneName(tz string) string {
	name := strings.TrimLeft(tz, ":")
	if i := strings.IndexAny(name, "+-0123456789"); i >= 3 {
		return name[:i]
	}
	return ""
}

// variableCause returns the cause that a different variable indicates.
func variableCause(key string) Cause {
	switch {
	case key == "TZ":
		return Zone
	case key == "LANG" || key == "LANGUAGE" || strings.HasPrefix(key, "LC_"):
		return Locale
	case key == "USER" || key == "LOGNAME" || key == "HOME":
		return Owner
	case key == "HOSTNAME":
		return Hostname
	case key == "PWD" || key == "OLDPWD" || strings.HasSuffix(key, "TMPDIR"):
		return Path
	case key == "PYTHONHASHSEED" || key == "PERL_HASH_SEED":
		return HashSeed
	case key == "SOURCE_DATE_EPOCH":
		return Timestamp
	}
	return Environment
}

// patterns recognize words by their look. first holds the bytes with which they may begin.
var patterns = []struct {
	first string
	re    *regexp.Regexp
	kind  Cause
}{
	{"/", regexp.MustCompile(`^/(?:tmp|var/tmp|dev/shm)/[\w.+~-]+`), Path},
	{"tc", regexp.MustCompile(`^(?:tmp\.[0-9A-Za-z]{6,10}\b|cc[0-9A-Za-z]{6}\.[a-z]{1,3}\b)`), Path}, // mktemp(1), gcc
	{
		"0123456789abcdefABCDEF",
		regexp.MustCompile(`^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b`),
		Random,
	},
	{"-dlbcps", regexp.MustCompile(`^[-dlbcps](?:[-r][-w][-xsStT]){3}`), Mode},
	{"0", regexp.MustCompile(`^0\.\d{12,}`), Random},
}

// words splits s.
func (l *lexer) words(s string) []word {
	var ws []word
	for i := 0; i < len(s); {
		w := l.wordAt(s, i)
		w.at = i
		i += len(w.text)
		ws = append(ws, w)
	}
	return ws
}

// wordAt returns the word at byte i of s. It is not empty.
func (l *lexer) wordAt(s string, i int) word {
	rest := s[i:]
	if begins := i == 0 || !isWordByte(s[i-1]) || !isWordByte(s[i]); begins {
		if w := l.patternAt(rest); w.text != "" {
			return w
		}
	}
	if n := span(rest, isSpace); n > 0 {
		return word{text: rest[:n]}
	}
	if n := span(rest, isLongByte); n >= minLong && !strings.HasPrefix(rest, "0x") {
		n += span(rest[n:], func(c byte) bool { return c == '=' })
		if looksRandom(rest[:n]) {
			return word{text: rest[:n], kind: l.long(s, i)}
		}
	}
	n := span(rest, isDigit)
	if n > 0 && n+1 < len(rest) && rest[n] == '.' && isDigit(rest[n+1]) {
		n += 1 + span(rest[n+1:], isDigit)
	}
	if n == 0 || n < len(rest) && isWordByte(rest[n]) && !isUnit(rest[n:]) {
		n = max(1, span(rest, isWordByte))
	}
	return word{text: rest[:n], kind: l.number(rest[:n], s, i)}
}

// isUnit reports whether s begins with a unit of time.
func isUnit(s string) bool {
	n := span(s, isWordByte)
	return n <= 2 && slices.Contains([]string{"s", "ms", "us", "ns"}, s[:n])
}

// patternAt returns the word at the beginning of s if it is a fact, a time or matches a pattern.
func (l *lexer) patternAt(s string) word {
	for _, lit := range l.literals {
		n := len(lit.text)
		if strings.HasPrefix(s, lit.text) && (n == len(s) || !isWordByte(s[n]) || !isWordByte(s[n-1])) {
			return word{text: lit.text, kind: lit.kind, known: true}
		}
	}
	if m, n := parseTime(s); n > 0 && (n == len(s) || !isWordByte(s[n])) {
		return word{text: s[:n], kind: Timestamp, timeText: m}
	}
	for _, pattern := range patterns {
		if strings.IndexByte(pattern.first, s[0]) < 0 {
			continue
		}
		if found := pattern.re.FindString(s[:min(len(s), maxLine)]); found != "" {
			return word{text: found, kind: pattern.kind}
		}
	}
	return word{}
}

// span returns the length of the longest prefix of s whose bytes satisfy is.
func span(s string, is func(c byte) bool) int {
	n := 0
	for n < len(s) && is(s[n]) {
		n++
	}
	return n
}

func isSpace(c byte) bool  { return c == ' ' || c >= '\t' && c <= '\r' }
func isDigit(c byte) bool  { return c >= '0' && c <= '9' }
func isLetter(c byte) bool { return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= 0x80 }

// isWordByte reports whether c is a letter or a digit; "_" joins words and is neither.
func isWordByte(c byte) bool { return isDigit(c) || isLetter(c) }

// isLongByte reports whether c occurs in base64, in either alphabet, or hex.
func isLongByte(c byte) bool { return isWordByte(c) && c < 0x80 || c == '+' || c == '/' || c == '_' }

// minLong is the minimum length of a word that looks random.
const minLong = 16

// looksRandom reports whether a long word mixes digits and letters throughout, unlike words that people write.
func looksRandom(s string) bool {
	if len(s) > maxLine || strings.Count(s, "/") > len(s)/8 {
		return false
	}
	digits, changes := 0, 0
	for i := range len(s) {
		if isDigit(s[i]) {
			digits++
		}
		if i > 0 && class(s[i]) != class(s[i-1]) {
			changes++
		}
	}
	return digits > 0 && digits < len(s) && changes >= len(s)/5
}

// class distinguishes digits, small letters, capitals and other bytes.
func class(c byte) int {
	switch {
	case isDigit(c):
		return 0
	case c >= 'a' && c <= 'z':
		return 1
	case c >= 'A' && c <= 'Z':
		return 2
	}
	return 3
}

// wordCauses maps words in front of a number to the cause of its difference.
var wordCauses = map[string]Cause{
	"pid": ProcessID, "pids": ProcessID, "ppid": ProcessID, "tid": ProcessID, "tgid": ProcessID, "pgid": ProcessID,
	"process": ProcessID,
	"child":   ProcessID, "proc": ProcessID,
	"uptime": Uptime, "up": Uptime, "monotonic": Uptime, "boot": Uptime, "booted": Uptime,
	"uid": Owner, "gid": Owner, "euid": Owner, "egid": Owner, "user": Owner, "owner": Owner, "group": Owner,
	"umask": Mode, "mode": Mode, "perm": Mode, "perms": Mode, "permissions": Mode,
	"cpu": Processors, "cpus": Processors, "core": Processors, "cores": Processors, "procs": Processors, "processor": Processors,
	"processors": Processors, "nproc": Processors, "threads": Processors, "jobs": Processors, "workers": Processors,
	"elapsed": Duration, "took": Duration, "duration": Duration, "real": Duration, "sys": Duration,
	"time": Timestamp, "timestamp": Timestamp,
}

// precedingWords returns the last two words before byte i of s in lower case, and how many bytes separate the last one
// from i.
func precedingWords(s string, i int) (last, before string, gap int) {
	s = s[max(0, i-32):i]
	word := func() string {
		to := len(s)
		for to > 0 && !isLetter(s[to-1]) {
			to--
		}
		from := to
		for from > 0 && isLetter(s[from-1]) {
			from--
		}
		w := strings.ToLower(s[from:to])
		s = s[:from]
		return w
	}
	all := len(s)
	last = word()
	gap = all - len(s) - len(last)
	return last, word(), gap
}

// number returns the cause that a decimal or hexadecimal number at byte i of s indicates; Unknown for other words.
func (l *lexer) number(text, s string, i int) Cause {
	whole, fraction, _ := strings.Cut(text, ".")
	if digits, ok := strings.CutPrefix(strings.ToLower(whole), "0x"); ok {
		if v, err := strconv.ParseUint(digits, 16, 64); err == nil && isAddress(v) {
			return Address
		} else if err == nil && l.facts.ofRun(v) {
			return Timestamp
		}
		return Unknown
	}
	if hex, err := strconv.ParseUint(whole, 16, 64); err == nil {
		switch {
		case len(whole) == 8 && !l.facts.Start.IsZero() && l.facts.ofRun(hex):
			return Timestamp
		case len(whole) == 12 && isAddress(hex):
			return Address
		}
	}
	v, err := strconv.ParseUint(whole, 10, 64)
	if err != nil {
		return Unknown
	}
	after := s[i+len(text):]
	last, before, gap := precedingWords(s, i)
	word := wordCauses[last]
	if word == Unknown && (last == "id" || last == "number" || last == "seconds") {
		word = wordCauses[before]
	}
	if gap > 4 {
		word = Unknown
	}
	switch {
	case l.facts.ofRun(v):
		return Timestamp
	case isAddress(v) && (len(whole) == 14 || len(whole) == 15):
		return Address
	case fraction != "" && word == Owner, isUnit(after), fraction != "" && word == Timestamp: // "user 0.12" of time(1)
		return Duration
	case word == ProcessID && v <= 1<<22, word == Mode && isOctal(whole), word == Owner, word == Uptime:
		return word
	case i >= 2 && s[i-1] == '[' && isWordByte(s[i-2]) && strings.HasPrefix(after, "]") && v <= 1<<22: // name[PID] in logs
		return ProcessID
	case isOctal(whole) && l.facts.Umask != 0 && l.ofMask(whole):
		return Mode
	case l.numbers[v] != Unknown && fraction == "":
		return l.numbers[v]
	case word == Processors, strings.HasSuffix(s[:i], " -j"), strings.HasSuffix(s[:i], " -j "):
		return Processors
	case len(whole) > 9 && (strings.HasPrefix(last, "hash") || strings.HasPrefix(before, "hash")):
		return HashSeed
	case word == Duration, strings.HasPrefix(after, " ms"), strings.HasPrefix(after, " sec"):
		return Duration
	case word == Timestamp:
		return word
	case len(whole) >= 17:
		return Random
	}
	return Unknown
}

func isOctal(s string) bool {
	return len(s) >= 3 && len(s) <= 7 && strings.Trim(s, "01234567") == ""
}

// ofMask reports whether an octal number is the umask or a file mode that follows from it.
func (l *lexer) ofMask(s string) bool {
	v, err := strconv.ParseUint(s, 8, 32)
	if err != nil {
		return false
	}
	mask, mode := l.facts.Umask, uint32(v)&0o777
	return uint32(v) == mask || mode == 0o666&^mask || mode == 0o777&^mask
}

// long returns the cause that a word at byte i of s indicates if it looks random.
func (l *lexer) long(s string, i int) Cause {
	last, before, _ := precedingWords(s, i)
	if last == "buildid" || last == "id" && before == "build" {
		return BuildID
	}
	for _, w := range []string{last, before} {
		for _, digest := range []string{"sha", "hash", "md", "digest", "checksum", "sum", "crc", "blake"} {
			if strings.HasPrefix(w, digest) {
				return Unknown // a consequence of another difference
			}
		}
	}
	if isDigest(s[i:]) && !slices.ContainsFunc([]string{last, before}, func(w string) bool { return drawn[w] }) {
		return Unknown
	}
	return Random
}

// drawn are words that precede random values.
var drawn = map[string]bool{
	"salt": true, "nonce": true, "key": true, "token": true, "seed": true, "random": true, "secret": true, "boundary": true,
	"uuid": true, "guid": true, "id": true, "iv": true,
}

// isDigest reports whether s begins with the hexadecimal digits of a usual digest, as hashes of git and names of cached
// files do. They depend on something else that differs.
func isDigest(s string) bool {
	n := span(s, func(c byte) bool { return isDigit(c) || c >= 'a' && c <= 'f' })
	return (n == len(s) || !isWordByte(s[n])) && slices.Contains([]int{32, 40, 56, 64, 96, 128}, n)
}
