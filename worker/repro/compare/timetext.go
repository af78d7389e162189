// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"regexp"
	"strconv"
	"strings"
	"time"
)

// A timeText is a time in a text: a date, a time of day, or both, in an unknown zone.
type timeText struct {
	wall        time.Time // in UTC; on 1 January of year 1 if there is no date
	date, clock bool      // which parts the text has
	// macro means that it has the form of __DATE__, __TIME__ or __TIMESTAMP__.
	macro bool
}

// Parts of time formats with the groups that parseTime reads.
const (
	year      = `(?P<y>\d{4})`
	monthName = `(?P<b>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}`
	dayName   = `(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}`
	day       = `(?P<d>[ \d]?\d)`
	hms       = `(?P<H>\d\d):(?P<M>\d\d)(?::(?P<S>\d\d)(?:[.,]\d+)?)?`
	zone      = `(?: ?(?:Z\b|[A-Z]{3,5}(?:[+-]\d\d:\d\d)?\b|[+-]\d\d(?::?\d\d)?\b))?`
)

// timeFormats are the usual formats, the most specific first: ISO 8601 (long, short), Go's log and ls, RFC 1123,
// asctime(3) and date(1), __DATE__, __TIME__ and other common ones. 16 digits have hundredths of a second (ISO 9660).
var timeFormats = func() []*regexp.Regexp {
	var all []*regexp.Regexp
	for _, s := range []string{
		year + `-(?P<m>\d\d)-(?P<d>\d\d)(?:[T ]` + hms + zone + `)?`,
		year + `/(?P<m>\d\d)/(?P<d>\d\d)(?:[T ]` + hms + zone + `)?`,
		year + `(?P<m>[01]\d)(?P<d>[0-3]\d)(?:T?(?P<H>[0-2]\d)(?P<M>[0-5]\d)(?P<S>[0-5]\d)(?:\d\d)?Z?)?\b`,
		`(?:` + dayName + `,? )?` + day + `[ -]` + monthName + `[ -]` + year + `(?: ` + hms + zone + `)?`,
		dayName + ` ` + monthName + ` ` + day + ` ` + hms + zone + `(?: ` + year + `)?`,
		dayName + ` ` + day + ` ` + monthName + ` ` + hms + zone + `(?: ` + year + `)?`,
		monthName + ` ` + day + `,?  ?` + year + `(?: ` + hms + zone + `)?`, // two spaces: ls -l
		monthName + ` ` + day + ` ` + hms,
		monthName + ` ` + year + `\b`,
		`(?P<d>\d\d?)[./](?P<m>\d\d?)[./]` + year,
		hms,
	} {
		all = append(all, regexp.MustCompile(`^`+s))
	}
	return all
}()

var months = []string{"Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"}

// macroText matches the preprocessor's macros (C11, 6.10.8.1; __TIMESTAMP__ has the form of asctime(3)), and the usual
// __DATE__ " " __TIME__, which the compiler concatenates.
var macroText = regexp.MustCompile(
	`^(?:[JFMASOND][a-z]{2} [ \d]\d \d{4}(?: \d\d:\d\d:\d\d)?|\d\d:\d\d:\d\d|[SMTWF][a-z]{2} [JFMASOND][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})$`,
)

// parseTime returns the time at the beginning of s and its length, 0 if there is none.
func parseTime(s string) (timeText, int) {
	s = s[:min(len(s), 64)]
	if !mayBeTime(s) {
		return timeText{}, 0
	}
	for _, n := range timeFormats {
		groups := n.FindStringSubmatch(s)
		if groups == nil {
			continue
		}
		at := map[string]int{}
		for i, name := range n.SubexpNames() {
			if name == "" || groups[i] == "" {
				continue
			}
			v, err := strconv.Atoi(strings.TrimSpace(groups[i]))
			for m, month := range months {
				if err != nil && groups[i] == month {
					v, name, err = m+1, "m", nil
				}
			}
			at[name] = v
		}
		if at["m"] > 31 || at["d"] > 31 || at["H"] > 24 || at["M"] > 59 || at["S"] > 60 {
			continue
		}
		m := timeText{date: at["d"]+at["y"] > 0, macro: macroText.MatchString(groups[0])}
		_, m.clock = at["H"]
		m.wall = time.Date(max(1, at["y"]), time.Month(max(1, at["m"])), max(1, at["d"]), at["H"], at["M"], at["S"], 0,
			time.UTC)
		return m, len(groups[0])
	}
	return timeText{}, 0
}

// mayBeTime is a quick check of how all formats begin.
func mayBeTime(s string) bool {
	digits := span(s, isDigit)
	switch {
	case digits == 0:
		return len(s) > 3 &&
			strings.Contains("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec Mon Tue Wed Thu Fri Sat Sun ", s[:3]+" ")
	case digits == len(s):
		return digits == 8 || digits == 14 || digits == 16
	case digits == 8, digits == 14, digits == 16:
		return true
	case digits == 4:
		return s[4] == '-' || s[4] == '/'
	}
	return digits <= 2 && strings.IndexByte(":./ -", s[digits]) >= 0
}

// timeCause returns Zone if the zones of the runs differ and explain more of the distance than the time between the
// runs, else Timestamp.
func timeCause(a, b timeText, k Known) Cause {
	if a.date != b.date || k.A.Zone == k.B.Zone || k.A.Start.IsZero() || k.B.Start.IsZero() {
		return Timestamp
	}
	apart := abs(a.wall.Sub(b.wall))
	between := abs(k.A.Start.Sub(k.B.Start))
	slack := max(k.A.End.Sub(k.A.Start), k.B.End.Sub(k.B.Start)) + 2*time.Second
	switch {
	case !a.date: // modulo a day
		const wholeDay = 24 * time.Hour
		apart, between = min(apart, wholeDay-apart), between%wholeDay
		between = min(between, wholeDay-between)
	case a.wall.Year() == 1 || b.wall.Year() == 1:
		between = min(between, 366*24*time.Hour)
	}
	if more := abs(apart - between); more > slack && more > between {
		return Zone
	}
	return Timestamp
}

func abs(d time.Duration) time.Duration { return max(d, -d) }

// ofRun reports whether v is the time of the run in seconds, milli-, micro- or nanoseconds since 1970. If the time of
// the run is unknown it reports whether v is a plausible time in seconds.
func (f *Facts) ofRun(v uint64) bool {
	if f.Start.IsZero() {
		return v >= 1_300_000_000 && v < 2_600_000_000
	}
	for _, unit := range []uint64{1, 1e3, 1e6, 1e9} {
		if s := int64(v / unit); s >= f.Start.Unix()-1 && s <= f.End.Unix()+1 {
			return true
		}
	}
	return false
}
