// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"regexp"
	"strconv"
	"strings"
	"time"
)

// A moment is a time as a text has it: on the wall of some zone, to a day, or within a day.
type moment struct {
	wall        time.Time // as if the zone was UTC; on 1 January of year 1 where the day is not told
	date, clock bool      // which of both the text has
	// macro says that it is written as the preprocessor writes __DATE__, __TIME__ or __TIMESTAMP__.
	macro bool
}

// Pieces of notations; their groups are what a moment has.
const (
	year      = `(?P<y>\d{4})`
	monthName = `(?P<b>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}`
	dayName   = `(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}`
	day       = `(?P<d>[ \d]?\d)`
	hms       = `(?P<H>\d\d):(?P<M>\d\d)(?::(?P<S>\d\d)(?:[.,]\d+)?)?`
	zone      = `(?: ?(?:Z\b|[A-Z]{3,5}(?:[+-]\d\d:\d\d)?\b|[+-]\d\d(?::?\d\d)?\b))?`
)

// notations are those in use, the more telling first: ISO 8601 (long, short), Go's log and ls, RFC 1123, asctime(3) and
// date(1), __DATE__, __TIME__ and what people write.
var notations = func() []*regexp.Regexp {
	var all []*regexp.Regexp
	for _, s := range []string{
		year + `-(?P<m>\d\d)-(?P<d>\d\d)(?:[T ]` + hms + zone + `)?`,
		year + `/(?P<m>\d\d)/(?P<d>\d\d)(?:[T ]` + hms + zone + `)?`,
		year + `(?P<m>[01]\d)(?P<d>[0-3]\d)(?:T?(?P<H>[0-2]\d)(?P<M>[0-5]\d)(?P<S>[0-5]\d)Z?)?\b`,
		`(?:` + dayName + `,? )?` + day + `[ -]` + monthName + `[ -]` + year + `(?: ` + hms + zone + `)?`,
		dayName + ` ` + monthName + ` ` + day + ` ` + hms + zone + `(?: ` + year + `)?`,
		dayName + ` ` + day + ` ` + monthName + ` ` + hms + zone + `(?: ` + year + `)?`,
		monthName + ` ` + day + `,? ` + year + `(?: ` + hms + zone + `)?`,
		monthName + ` ` + day + ` ` + hms,
		`(?P<d>\d\d?)[./](?P<m>\d\d?)[./]` + year,
		hms,
	} {
		all = append(all, regexp.MustCompile(`^`+s))
	}
	return all
}()

var months = []string{"Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"}

// macroText is what the preprocessor writes (C11, 6.10.8.1; of __TIMESTAMP__ as asctime(3) does).
var macroText = regexp.MustCompile(`^(?:[JFMASOND][a-z]{2} [ \d]\d \d{4}|\d\d:\d\d:\d\d|[SMTWF][a-z]{2} [JFMASOND][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})$`)

// momentAt returns the time that is written at the beginning of s, and its length, 0 if there is none.
func momentAt(s string) (moment, int) {
	s = s[:min(len(s), 64)]
	if !mayBeMoment(s) {
		return moment{}, 0
	}
	for _, n := range notations {
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
		m := moment{date: at["d"] > 0, macro: macroText.MatchString(groups[0])}
		_, m.clock = at["H"]
		m.wall = time.Date(max(1, at["y"]), time.Month(max(1, at["m"])), max(1, at["d"]), at["H"], at["M"], at["S"], 0, time.UTC)
		return m, len(groups[0])
	}
	return moment{}, 0
}

// mayBeMoment is a quick look at how all notations begin.
func mayBeMoment(s string) bool {
	digits := span(s, isDigit)
	switch {
	case digits == 0:
		return len(s) > 3 && strings.Contains("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec Mon Tue Wed Thu Fri Sat Sun ", s[:3]+" ")
	case digits == len(s):
		return digits == 8 || digits == 14
	case digits == 8, digits == 14:
		return true
	case digits == 4:
		return s[4] == '-' || s[4] == '/'
	}
	return digits <= 2 && strings.IndexByte(":./ -", s[digits]) >= 0
}

// momentCause says whether two moments differ for the zone or for the time of the run: for the zone if the zones differ, and
// more than the time that lies between the two runs.
func momentCause(a, b moment, k Known) Cause {
	if a.date != b.date || k.A.Zone == k.B.Zone || k.A.Start.IsZero() || k.B.Start.IsZero() {
		return Timestamp
	}
	apart := abs(a.wall.Sub(b.wall))
	between := abs(k.A.Start.Sub(k.B.Start))
	slack := max(k.A.End.Sub(k.A.Start), k.B.End.Sub(k.B.Start)) + 2*time.Second
	switch {
	case !a.date: // the difference of days is not known
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

// ofRun reports whether a number is the time of a run with these facts, in seconds since 1970 or a decimal fraction of
// them, to a second. Where the run's time is not known, whether it is a time of these years in seconds.
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
