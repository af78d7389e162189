// SPDX-License-Identifier: Apache-2.0

package compare

// A CauseRow explains a Cause. docs/causes.md contains the table.
type CauseRow struct {
	Cause Cause
	// Meaning is one line.
	Meaning string
}

// Causes explains all causes, in the order of docs/causes.md. Callers must not change it.
var Causes = []CauseRow{
	{Timestamp, "the time of the run, in a field or a text"},
	{Duration, "how long something took"},
	{BuildDate, "the preprocessor's __DATE__, __TIME__ or __TIMESTAMP__"},
	{BuildID, "an ID that the linker derives from the content or generates at random"},
	{Path, "the path of the working directory or of a temporary file"},
	{Owner, "the user or group, as number or name"},
	{Mode, "file permissions that depend on the umask"},
	{MemberOrder, "the order in which a directory was read"},
	{Locale, "the sort order or language of the locale"},
	{Zone, "the time zone"},
	{HashSeed, "the order of a hash table with a random seed"},
	{Random, "random bytes: UUIDs, salts, names"},
	{Compressed, "compressed or encrypted data of a format that is not unpacked"},
	{Hostname, "the host name"},
	{ProcessID, "a process ID"},
	{Address, "a pointer, which address space layout randomization changes"},
	{Parallel, "a race between processes or threads"},
	{Processors, "the number of processors"},
	{Environment, "an environment variable that the command does not set"},
	{Uptime, "a monotonic clock or the time since boot"},
	{PersistentWorker, "what the process of a persistent worker kept from earlier requests"},
}
