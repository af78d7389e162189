// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"strings"
	"testing"
	"time"
)

// knownRuns returns facts that all differ: the runs are a year apart, the zones fourteen hours.
func knownRuns() Known {
	start := time.Date(2026, 11, 22, 0, 44, 31, 0, time.UTC)
	return Known{
		A: &Facts{
			Start: start, End: start.Add(3 * time.Second), Zone: "UTC", Locale: "C", Hostname: "cloister", User: "builder", UID: 1000,
			Umask: 0o022, Root: "/b/build", CPUs: 4, Env: []string{"PATH=/usr/bin", "PAD=x"},
		},
		B: &Facts{
			Start: start.Add(400 * 24 * time.Hour), End: start.Add(400*24*time.Hour + 2*time.Second), Zone: "XYZ-14", Locale: "de_DE.UTF-8",
			Hostname: "host-b7", User: "alice", UID: 2345, Umask: 0o077, Root: "/b/somewhere/else", CPUs: 1, Env: []string{"PATH=/usr/bin", "PAD=xxxxxxxxxx", "MORE=1"},
		},
	}
}

func TestClassifyNamesTheCause(t *testing.T) {
	all := knownRuns()
	with := func(change func(k *Known)) Known {
		k := knownRuns()
		change(&k)
		return k
	}
	sameTime := with(func(k *Known) { k.B.Start, k.B.End = k.A.Start, k.A.End })
	const now, later = "1795308271", "1829868271" // of twoRuns
	for _, row := range []struct {
		name, a, b string
		known      Known
		want       Cause
	}{
		{"seconds", "built " + now, "built " + later, all, Timestamp},
		{"seconds in a word", "v1_" + now, "v1_" + later, all, Timestamp},
		{"milliseconds", now + "123", later + "456", all, Timestamp},
		{"nanoseconds", now + "123456789", later + "456789012", all, Timestamp},
		{"fractions", now + ".25", later + ".75", all, Timestamp},
		{"seconds in hex", "6b0241ef", "6d1196ef", all, Unknown},
		{"seconds without facts", "t=1795308271", "t=1795308272", Known{}, Timestamp},
		{"ISO", "2026-11-22T00:44:31Z", "2027-12-27T00:44:32Z", all, Timestamp},
		{"date", "# 2026-11-22", "# 2027-12-27", all, Timestamp},
		{"compact", "build-20261122.1", "build-20271227.1", all, Timestamp},
		{"RFC 1123", "Date: Sun, 22 Nov 2026 00:44:31 GMT", "Date: Mon, 27 Dec 2027 00:44:32 GMT", all, Timestamp},
		{"date(1)", "Sun Nov 22 00:44:31 UTC 2026", "Mon Dec 27 00:44:31 UTC 2027", Known{}, Timestamp},
		{"asctime", "Sun Nov  2 00:44:31 2026", "Mon Dec 27 00:44:31 2027", all, Timestamp},
		{"clock", "done at 00:44:31", "done at 00:44:35", Known{}, Timestamp},
		{"__DATE__ in text", "Nov 22 2026", "Dec 27 2027", all, Timestamp},
		{"__DATE__ and __TIME__ in text", "Nov 22 2026 23:19:21", "Dec 27 2027 20:32:50", all, Timestamp},
		{"zone, clock", "00:44:31", "14:44:31", sameTime, Zone},
		{"zone, date", "Sun Nov 22 00:44:31 UTC 2026", "Sun Nov 22 14:44:31 XYZ 2026", sameTime, Zone},
		{"zone, day", "2026-11-22", "2026-11-23", sameTime, Zone},
		{"hours apart in one zone", "00:44:31", "14:44:31", with(func(k *Known) { k.B.Start, k.B.End, k.B.Zone = k.A.Start, k.A.End, k.A.Zone }), Timestamp},
		{"zone without a name", "Sun Nov 22 00:44:31 UTC 2026", "Mon Dec 27 14:44:31 +14 2027", all, Timestamp},
		{"zone of Java", "#Sun Nov 22 00:44:31 GMT 2026", "#Mon Dec 27 14:44:31 GMT+14:00 2027", all, Timestamp},
		{"zone without a name, at one time", "Sun Nov 22 00:44:31 UTC 2026", "Sun Nov 22 14:44:31 +14 2026", sameTime, Zone},
		{"zone, offset", "+0000 x", "+1400 x", sameTime, Unknown},
		{"zone, name", "(UTC)", "(XYZ)", sameTime, Zone},
		{"root", "at /b/build/src/x.c:3", "at /b/somewhere/else/src/x.c:3", all, Path},
		{"temporary", "/tmp/tmp.aX3/out", "/tmp/tmp.bY4/out", Known{}, Path},
		{"temporary, without a directory", "tmp.hjbCeQJgHd", "tmp.sWmINpQwxy", Known{}, Path},
		{"temporary, of gcc", "FILE ccAbcdEf.o", "FILE ccxyZqrs.o", Known{}, Path},
		{
			"root that is like the user", "cache=/home/build/.cache", "cache=/home/alice/.cache",
			with(func(k *Known) { k.A.User, k.A.Root = "build", "/build" }), Owner,
		},
		{"hostname", "root@cloister:", "root@host-b7:", all, Hostname},
		{"hostname is a word", "the cloisters", "the host-b7s", all, Unknown},
		{"user", "by builder.", "by alice.", all, Owner},
		{"home", "/home/builder/.cache", "/home/alice/.cache", all, Owner},
		{"uid", "id 1000", "id 2345", all, Owner},
		{"uid by its word", "uid=1000(x)", "uid=1001(x)", Known{}, Owner},
		{"umask", "0022", "0077", all, Mode},
		{"mode", "-rw-r--r-- 1 x", "-rw------- 1 x", Known{}, Mode},
		{"octal mode", "644 x", "600 x", all, Mode},
		{"cpus", "make -j 4", "make -j 1", all, Processors},
		{"cpus by their word", "cpus: 8", "cpus: 4", Known{}, Processors},
		{"other small numbers", "found 3", "found 4", all, Unknown},
		{"a fact on one side only", "exit 1000", "exit 77", all, Unknown},
		{"locale", "1.5 ms", "1,5 ms", all, Locale},
		{"marks, without a number", "x,", "x", all, Unknown},
		{"locale, message", "No such file", "Datei nicht gefunden, ä", all, Locale},
		{"locale, variable", "LANG=C", "LANG=de_DE.UTF-8", all, Locale},
		{"padding", "PAD=x", "PAD=xxxxxxxxxx", all, Environment},
		{"count of variables", "2 variables", "3 variables", all, Environment},
		{"pid", "pid 4711", "pid 4793", Known{}, ProcessID},
		{"pid in a log", "make[12]: x", "make[79]: x", Known{}, ProcessID},
		{"proc", "/proc/12/fd", "/proc/79/fd", Known{}, ProcessID},
		{"stack", "<object at 0x7f3a5c001230>", "<object at 0x7f11aa001230>", Known{}, Address},
		{"PIE", "main=0x55d0c8a3f139", "main=0x5603c1e2d139", Known{}, Address},
		{"without 0x", "55d0c8a3f000-55d0c8a40000 r", "5603c1e2d000-5603c1e2e000 r", Known{}, Address},
		{"decimal pointer", "id 139872003817200", "id 140213377263344", Known{}, Address},
		{"held layout", "0x7f3a5c001230", "0x7f11aa001230", with(func(k *Known) { k.A.FixedLayout, k.B.FixedLayout = true, true }), Unknown},
		{"UUID", "id 550e8400-e29b-41d4-a716-446655440000", "id 123e4567-e89b-42d3-a456-426614174000", Known{}, Random},
		{"16 digits", "made 2026112212345600.", "made 2026112315003300.", Known{}, Timestamp},
		{"a month", "since November 2026", "since December 2027", Known{}, Timestamp},
		{"a key in hex", "key 9f86d081884c7d659a2feaa0c55ad015", "key 2c26b46b68ffc68ff99b453c1d304134", Known{}, Random},
		{"a digest", "9f86d081884c7d659a2feaa0c55ad015", "2c26b46b68ffc68ff99b453c1d304134", Known{}, Unknown},
		{"base64", "k3J2p0Qw9sZx7LmN4bVt1g==", "Zq8Yw2Hc5RfT0uXa6oKd3e==", Known{}, Random},
		{"name of mktemp", "tmp-a8f3Kd92", "tmp-Qz81mN0p", Known{}, Random},
		{"short digest", "main.3f9a8b7c.js", "main.91b04de2.js", Known{}, Unknown},
		{"duration", "run took 0.25s", "run took 0.31s", all, Duration},
		{"duration in ms", "(12ms)", "(15ms)", all, Duration},
		{"fraction", "0.8444218515250481", "0.7579544029403025", Known{}, Random},
		{
			"held random", "9f86d081884c7d659a2feaa0c55ad015", "2c26b46b68ffc68ff99b453c1d304134",
			with(func(k *Known) { k.A.HeldRandom, k.B.HeldRandom = true, true }), Unknown,
		},
		{"a digest follows", "sha256: 9f86d081884c7d659a2feaa0c55ad015", "sha256: 2c26b46b68ffc68ff99b453c1d304134", Known{}, Unknown},
		{"build id", "BuildID: 9f86d081884c7d659a2feaa0c55ad015", "BuildID: 2c26b46b68ffc68ff99b453c1d304134", Known{}, BuildID},
		{"hash", "hash(x) = -1234567890123456789", "hash(x) = 987654321098765432", Known{}, HashSeed},
		{"uptime", "up 1234.56", "up 9876.54", Known{}, Uptime},
		{"set", "{'b', 'a', 'c'}", "{'a', 'c', 'b'}", Known{}, HashSeed},
		{
			"set, of a seed that is not of the kernel", "{'b', 'a', 'c'}", "{'a', 'c', 'b'}",
			with(func(k *Known) { k.A.HeldRandom, k.B.HeldRandom = true, true }), HashSeed,
		},
		{"list of files", "['b.txt', 'a.txt']", "['a.txt', 'b.txt']", Known{}, MemberOrder},
		{"plain words", "this", "that", all, Unknown},
	} {
		t.Run(row.name, func(t *testing.T) {
			if got := newClassifier(row.known).causes(row.a, row.b, "text")[0]; got != row.want {
				t.Errorf("got %q, want %q", got, row.want)
			}
			k := Known{row.known.B, row.known.A}
			if got := newClassifier(k).causes(row.b, row.a, "text")[0]; got != row.want {
				t.Errorf("the other way round: got %q, want %q", got, row.want)
			}
			pre := strings.Repeat("the same text ", 100)
			if got := newClassifier(row.known).causes(pre+row.a, pre+row.b, "text")[0]; got != row.want {
				t.Errorf("in a long line: got %q, want %q", got, row.want)
			}
		})
	}
}

func TestClassifyNamesPreprocessorDatesInPrograms(t *testing.T) {
	for _, row := range []struct{ a, b, format string }{
		{"Nov 22 2026", "Nov 23 2026", "elf"},
		{"built Nov  2 2026 00:00:01", "built Nov  2 2026 00:00:02", "elf"},
		{"12:34:56", "12:34:57", "pe"},
		{"Sun Nov  2 00:44:31 2026", "Mon Dec 27 14:44:31 2027", "elf"}, // __TIMESTAMP__
	} {
		if got := newClassifier(Known{}).causes(row.a, row.b, row.format)[0]; got != BuildDate && row.a[0] != 'b' {
			t.Errorf("%q: got %q", row.a, got)
		}
	}
}

func TestClassifyOrderNamesTheCause(t *testing.T) {
	for _, row := range []struct {
		name, a, b string
		want       Cause
	}{
		{"bytes and people", "Beta Delta alpha gamma", "alpha Beta Delta gamma", Locale},
		{"people and bytes", "a_c ab b_a ba", "a_c ab ba b_a", HashSeed},
		{"files", "b.o a.o c.o", "a.o c.o b.o", MemberOrder},
		{"directories", "src/b src/a", "src/a src/b", MemberOrder},
		{"keys", "b=1 a=2 c=3", "a=2 c=3 b=1", HashSeed},
		{"sentences", "job 1 ended,job 2 ended", "job 2 ended,job 1 ended", Parallel},
	} {
		sep := " "
		if strings.Contains(row.a, ",") {
			sep = ","
		}
		if got := newClassifier(Known{}).classifyOrder(strings.Split(row.a, sep), strings.Split(row.b, sep)); got != row.want {
			t.Errorf("%s: got %q, want %q", row.name, got, row.want)
		}
	}
}
