// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// maxLine bounds what is looked at of a line or a field, in bytes.
const maxLine = 4 << 10

// A word is a piece of a text that means something as a whole.
type word struct {
	text   string
	at     int
	kind   Cause // why two texts may differ in it, Unknown if it says nothing
	moment moment
	// known says that it is one of the facts, word for word.
	known bool
}

// A literal is a text that is known to depend on the run.
type literal struct {
	text string
	kind Cause
}

// lexer cuts the texts of one side into words.
type lexer struct {
	facts    *Facts
	literals []literal // the longest first
	numbers  map[uint64]Cause
}

// newLexer returns that of the side that is told by f; only what is otherwise on the other side, o, means anything.
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
	} {
		if n.a != n.b {
			l.numbers[uint64(n.a)] = n.kind
		}
	}
	return l
}

// zoneName is how date(1) writes a zone of TZ in POSIX's notation, else "".
func zoneName(tz string) string {
	name := strings.TrimLeft(tz, ":")
	if i := strings.IndexAny(name, "+-0123456789"); i >= 3 {
		return name[:i]
	}
	return ""
}

// variableCause says for what a difference in a variable stands.
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

// shapes are words that are told by how they look.
var shapes = []struct {
	re   *regexp.Regexp
	kind Cause
}{
	{regexp.MustCompile(`^/(?:tmp|var/tmp|dev/shm)/[\w.+~-]+`), Path},
	{regexp.MustCompile(`^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b`), Random},
	{regexp.MustCompile(`^[-dlbcps](?:[-r][-w][-xsStT]){3}`), Mode},
	{regexp.MustCompile(`^0\.\d{12,}`), Random},
}

// pieces are the other words.
var (
	hexWord    = regexp.MustCompile(`^0[xX][0-9a-fA-F]+`)
	numberWord = regexp.MustCompile(`^\d+(?:\.\d+)?`)
	plainWord  = regexp.MustCompile(`^[\pL\d]+`)
	longWord   = regexp.MustCompile(`^[A-Za-z0-9+/_]{16,}={0,2}`)
	spaces     = regexp.MustCompile(`^\s+`)
)

// words cuts s.
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

// wordAt returns the word at byte i of s; it has at least one byte.
func (l *lexer) wordAt(s string, i int) word {
	rest := s[i:]
	if begins := i == 0 || !isWordByte(s[i-1]) || !isWordByte(s[i]); begins {
		for _, lit := range l.literals {
			if strings.HasPrefix(rest, lit.text) && (len(rest) == len(lit.text) || !isWordByte(rest[len(lit.text)]) || !isWordByte(rest[len(lit.text)-1])) {
				return word{text: lit.text, kind: lit.kind, known: true}
			}
		}
		if m, n := momentAt(rest); n > 0 && (n == len(rest) || !isWordByte(rest[n])) {
			return word{text: rest[:n], kind: Timestamp, moment: m}
		}
		for _, shape := range shapes {
			if found := shape.re.FindString(rest); found != "" {
				return word{text: found, kind: shape.kind}
			}
		}
	}
	for _, re := range []*regexp.Regexp{spaces, hexWord} {
		if found := re.FindString(rest); found != "" {
			return word{text: found, kind: l.number(found, s, i)}
		}
	}
	if found := longWord.FindString(rest); looksRandom(found) {
		return word{text: found, kind: l.long(found, s, i)}
	}
	if found := numberWord.FindString(rest); found != "" && (len(found) == len(rest) || !isWordByte(rest[len(found)])) {
		return word{text: found, kind: l.number(found, s, i)}
	}
	if found := plainWord.FindString(rest); found != "" {
		return word{text: found, kind: l.number(found, s, i)}
	}
	return word{text: rest[:1]}
}

func isWordByte(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= 0x80
}

// looksRandom reports whether a long word is none that a person writes: digits among letters all over.
func looksRandom(s string) bool {
	if len(s) < 16 || strings.Count(s, "/") > len(s)/8 {
		return false
	}
	digits, changes := 0, 0
	for i := range len(s) {
		if s[i] >= '0' && s[i] <= '9' {
			digits++
		}
		if i > 0 && class(s[i]) != class(s[i-1]) {
			changes++
		}
	}
	return digits > 0 && digits < len(s) && changes >= len(s)/5
}

// class tells digits, small letters, capitals and the rest apart.
func class(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return 0
	case c >= 'a' && c <= 'z':
		return 1
	case c >= 'A' && c <= 'Z':
		return 2
	}
	return 3
}

// Words that say what a number next to them is. They are looked for shortly before it.
var (
	beforePID    = regexp.MustCompile(`(?i)(?:\b[pt]?pids?\b|\bprocess\b|\bchild\b|/proc/)\W{0,4}(?:id\b|number\b|no\b)?\W{0,4}$|\w\[$`)
	beforeUptime = regexp.MustCompile(`(?i)(?:uptime|monotonic|\bboot|\bup\b)\W{0,4}\w{0,8}\W{0,4}$`)
	beforeTaken  = regexp.MustCompile(`(?i)(?:elapsed|\btook\b|duration|\bin\b|\breal\b|\bsys\b|time\w*)\W{0,4}$`)
	beforeHash   = regexp.MustCompile(`(?i)\bhash\w*\b.{0,16}$`)
	beforeDigest = regexp.MustCompile(`(?i)(?:sha\d*|hash|md5|digest|checksum|\bsum|crc\w*|blake\w*)[^\w]{0,4}(?:\w{0,8}\W{1,3})?$`)
	beforeID     = regexp.MustCompile(`(?i)build[ _-]?id\W{0,4}$`)
	beforeUser   = regexp.MustCompile(`(?i)\b(?:[eg]?[ug]id|user|owner|group)\W{0,4}$`)
	beforeCPUs   = regexp.MustCompile(`(?i)(?:cpus?|cores?|procs?|processors?|nproc|threads?|jobs?|workers?)\W{0,4}$|\s-j ?$`)
	beforeMode   = regexp.MustCompile(`(?i)(?:umask|mode|perm\w*)\W{0,4}$`)
)

// before returns what stands before byte i of s.
func before(s string, i int) string { return s[max(0, i-32):i] }

// number says why a number, decimal or hexadecimal, may differ that is at byte i of s; Unknown for any other word.
func (l *lexer) number(text, s string, i int) Cause {
	whole, fraction, _ := strings.Cut(text, ".")
	base := 10
	if digits, ok := strings.CutPrefix(strings.ToLower(whole), "0x"); ok {
		whole, base = digits, 16
	}
	v, err := strconv.ParseUint(whole, base, 64)
	if hex, err16 := strconv.ParseUint(whole, 16, 64); base == 10 && err16 == nil && len(whole) == 8 && !l.facts.Start.IsZero() && l.facts.ofRun(hex) {
		return Timestamp
	} else if base == 10 && err16 == nil && len(whole) == 12 && err != nil && isAddress(hex) {
		return Address
	}
	if err != nil {
		return Unknown
	}
	lead := before(s, i)
	after := s[i+len(text):]
	switch {
	case l.facts.ofRun(v):
		return Timestamp
	case isAddress(v) && (base == 16 || len(whole) == 15 || len(whole) == 14):
		return Address
	case base == 16:
		return Unknown
	case beforePID.MatchString(lead) && fraction == "" && v <= 1<<22:
		return ProcessID
	case beforeUptime.MatchString(lead):
		return Uptime
	case beforeUser.MatchString(lead):
		return Owner
	case beforeMode.MatchString(lead) && isOctal(whole):
		return Mode
	case isOctal(whole) && l.facts.Umask != 0 && l.ofMask(whole):
		return Mode
	case l.numbers[v] != Unknown && fraction == "":
		return l.numbers[v]
	case beforeCPUs.MatchString(lead):
		return Processors
	case beforeHash.MatchString(lead) && len(whole) > 9:
		return HashSeed
	case beforeTaken.MatchString(lead), strings.HasPrefix(after, " ms"), strings.HasPrefix(after, " seconds"), fraction != "" && strings.HasPrefix(after, "s"):
		return Timestamp
	case len(whole) >= 17:
		return Random
	}
	return Unknown
}

func isOctal(s string) bool {
	return len(s) >= 3 && len(s) <= 7 && strings.Trim(s, "01234567") == ""
}

// ofMask reports whether an octal number is the side's umask, or a mode of a file that follows from it.
func (l *lexer) ofMask(s string) bool {
	v, err := strconv.ParseUint(s, 8, 32)
	if err != nil {
		return false
	}
	mask, mode := l.facts.Umask, uint32(v)&0o777
	return uint32(v) == mask || mode == 0o666&^mask || mode == 0o777&^mask
}

// long says why a word may differ that looks random.
func (l *lexer) long(text, s string, i int) Cause {
	lead := before(s, i)
	switch {
	case beforeID.MatchString(lead):
		return BuildID
	case beforeDigest.MatchString(lead):
		return Unknown // of something that differs itself
	}
	return Random
}
