// SPDX-License-Identifier: Apache-2.0

// Package vm runs the tests of limits in virtual machines whose control groups are of version 2 alone. A guest consists
// of a kernel of Debian, systemd and other programs of this host, the unit of our packages, and test binaries. It is
// emulated: it needs neither hardware support nor root.
package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/microvm/initramfs"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/guestkernel"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
)

func TestMain(m *testing.M) {
	if os.Getpid() == 1 && os.Args[0] == guestInit {
		fmt.Println(boot())
		return // the kernel panics and the emulator ends
	}
	os.Exit(m.Run())
}

// A service is a unit of systemd that runs a test binary.
type service struct {
	name   string
	unit   string // file of our packages that the directives extend, if not empty
	add    string // directives of [Service]
	binary string
	run    string   // as in -test.run
	want   []string // tests that must pass, among others
}

// groupTests are the tests of control groups that need those of the guest.
var groupTests = []string{
	"TestMissingExplainsWhatCannotBeLimited", "TestMemoryIsLimitedAndCounted", "TestProcessesAreLimitedAndCounted",
	"TestGroupsOfDeadWorkersAreRemoved", "TestCloseRemovesEveryGroup", "TestV2RemoveKillsTheProcesses",
	"TestV2WorkerMovesToLeaf", "TestProcessorIsSharedByGroups", "TestProcessorsAreLimited",
}

// services run in this order.
var services = []service{
	{name: "root", add: "Delegate=yes", binary: "cgroup", run: ".", want: append([]string{"TestDisksAreLimited"}, groupTests...)},
	{name: "user", add: "Delegate=yes\nUser=cloister", binary: "cgroup", run: ".", want: groupTests},
	{
		name: "undelegated", add: "User=cloister", binary: "cgroup", run: "^TestOrdinaryUserGetsReasonAndFix$",
		want: []string{"TestOrdinaryUserGetsReasonAndFix"},
	},
	{
		name: "cloister", unit: "cloister.service", add: "WatchdogSec=0\nRestart=no", binary: "namespace",
		run: "^(TestBackend|TestNoSlotIsWithoutItsGroup|TestDiskRateReachesTheGroup|TestUsageMarksWhatWasNotMeasured)$/^(Probe|Limits|Usage)",
		want: []string{
			"TestBackend/ProbeNamesTheTier", "TestBackend/LimitsAreEnforced/memory_of_files",
			"TestBackend/LimitsAreEnforced/memory_of_processes", "TestBackend/LimitsAreEnforced/time_of_many_processes",
			"TestBackend/LimitsAreEnforced/processes", "TestBackend/LimitsAreEnforced/processors",
			"TestBackend/LimitsAreEnforced/disk_rate", "TestDiskRateReachesTheGroup",
			"TestBackend/LimitsOfOneRunDoNotOutliveIt",
			"TestNoSlotIsWithoutItsGroup", "TestUsageMarksWhatWasNotMeasured",
		},
	},
}

// kernels are packages of Debian 12. With clocks that count instructions, Linux 6.1 cannot start a second processor. It
// cannot measure the peak memory of one run either.
var kernels = []struct{ name, processors, skip string }{
	{guestkernel.Usual, "2", "^$"},
	{"linux-image-cloud-amd64", "1", "^TestBackend$/^UsageIsOfTheWholeRun$"},
}

const qemu = "qemu-system-x86_64"

// needMachines skips the test unless somebody wants virtual machines: they take minutes, and their kernels a download.
func needMachines(t *testing.T) {
	t.Helper()
	if !slices.Contains(strings.Split(os.Getenv("CLOISTER_REQUIRE"), ","), "vm") {
		sandboxtest.Unavailable(t, "vm", "booting virtual machines takes minutes: run make vm")
	}
}

func TestLimits(t *testing.T) {
	needMachines(t)
	if runtime.GOARCH != "amd64" {
		sandboxtest.Unavailable(t, "vm", "a processor other than amd64")
	}
	for _, tool := range []string{qemu, systemd, "apt-get", "dpkg-deb"} {
		if _, err := exec.LookPath(tool); err != nil {
			sandboxtest.Unavailable(t, "vm", err)
		}
	}
	binaries := compile(t)
	for _, kernel := range kernels {
		t.Run(kernel.name, func(t *testing.T) {
			k, err := guestkernel.Fetch(t.Context(), kernel.name)
			if err != nil {
				sandboxtest.Unavailable(t, "vm", err)
			}
			im := image{initramfs.Image{}}
			dirs, err := filepath.Glob(filepath.Join(k.Dir, "lib/modules/*/kernel"))
			must.Be(t, err == nil && len(dirs) == 1, "modules of the kernel: got %q, %v, want one directory", dirs, err)
			must.Succeed(t, errors.Join(im.system(binaries), im.units(binaries, kernel.skip), im.AddModules(dirs[0], modules)))
			report := run(t, k, im, kernel.processors)
			version, report, _ := strings.Cut(report, "\n")
			if t.Log(version); !strings.HasPrefix(version, "Linux ") {
				t.Error("the guest has no swap")
			}
			for _, s := range services {
				var output string
				output, report, _ = strings.Cut(report, "end "+s.name+"\n")
				t.Run(s.name, func(t *testing.T) { s.check(t, output) })
			}
		})
	}
}

// TestKernel fetches the kernel that other tests use.
func TestKernel(t *testing.T) {
	needMachines(t)
	k, err := guestkernel.Fetch(t.Context(), guestkernel.Usual)
	if err == nil {
		_, err = k.File("boot/vmlinuz-*")
	}
	if err != nil {
		sandboxtest.Unavailable(t, "vm", err)
	}
}

// compile returns the directory of the test binaries.
func compile(t *testing.T) string {
	t.Helper()
	packages := []string{"../../sandbox/internal/cgroup", "../../sandbox/namespace", "."}
	dir := t.TempDir()
	args := append([]string{"test", "-c", "-ldflags=-s -w", "-o", dir + "/"}, packages...)
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go test -c: %v\n%s", err, out)
	}
	must.Succeed(t, bazelrun.DependOn(append([]string{"-test"}, packages...)...))
	return dir
}

// system adds the guest's programs and accounts to the image.
func (im image) system(binaries string) error {
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		im.Add("/"+dir, link, "usr/"+dir)
	}
	for _, dir := range []string{"dev", "home", "proc", "root", "run", "sys", "var/lib", "var/tmp"} {
		im.Add("/"+dir, directory, "")
	}
	im.Add("/tmp", directory|0o1777, "")
	im.Add("/etc/passwd", regular, "root:x:0:0::/:/bin/sh\ncloister:x:990:990::/:/bin/sh\n")
	im.Add("/etc/group", regular, "root:x:0:\ncloister:x:990:\n")
	im.Add("/etc/machine-id", regular, strings.Repeat("1", 32)+"\n")
	im.Add("/etc/os-release", regular, "ID=debian\n")
	programs := strings.Fields("bash cat dd false head mkdir mkfifo sh sleep tail true uname /sbin/mkswap /sbin/swapon")
	programs = append(programs, systemd)
	if executor := systemd + "-executor"; exists(executor) { // since version 255
		programs = append(programs, executor)
	}
	return errors.Join(im.programs(programs...), im.Copy(guestInit, filepath.Join(binaries, "vm.test")))
}

// units adds the services, one that enables swap and writes the kernel's version, and one that powers off.
func (im image) units(binaries, skip string) error {
	const dir = "/etc/systemd/system/"
	var errs []error
	after, all := "begin.service", ""
	for _, s := range services {
		name := s.name + ".service"
		if s.unit != "" {
			errs = append(errs, im.Copy(dir+name, filepath.Join("../../cmd/packaging/systemd", s.unit)))
			name += ".d/test.conf"
		}
		errs = append(errs, im.Copy("/tests/"+s.binary+".test", filepath.Join(binaries, s.binary+".test")))
		im.Add(dir+name, regular, oneshot(after, fmt.Sprintf(`%s
TimeoutStartSec=infinity
Environment=PATH=/usr/bin:/bin TMPDIR=/tmp HOME=/tmp CLOISTER_REQUIRE=limits,namespaces
ExecStart=
ExecStart=/tests/%s.test -test.v -test.timeout=15m "-test.run=%s" "-test.skip=%s"
ExecStopPost=/bin/sh -c 'echo "$$SERVICE_RESULT"; echo end %s'
`, s.add, s.binary, strings.ReplaceAll(s.run, "$", "$$"), strings.ReplaceAll(skip, "$", "$$"), s.name)))
		after = s.name + ".service"
		all += " " + after
	}
	im.Add(dir+"begin.service", regular, oneshot("", `
ExecStart=/bin/sh -c '/sbin/mkswap /dev/vda > /dev/null && /sbin/swapon /dev/vda && exec uname -srv'
`))
	const end = "[Unit]\nSuccessAction=poweroff-immediate\nFailureAction=poweroff-immediate\n"
	im.Add(dir+"end.service", regular, end+oneshot(after, "ExecStart=/bin/true\n"))
	im.Add(dir+"default.target", regular, "[Unit]\nDefaultDependencies=no\nWants=begin.service end.service"+all+"\n")
	return errors.Join(errs...)
}

// oneshot returns a unit that starts after another and writes to the second serial port.
func oneshot(after, directives string) string {
	return "[Unit]\nDefaultDependencies=no\nAfter=" + after +
		"\n[Service]\nType=oneshot\nStandardOutput=file:/dev/ttyS1\nStandardError=inherit\n" + directives
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

// run boots the image and returns what its services wrote.
func run(t *testing.T, k guestkernel.Kernel, im image, processors string) string {
	t.Helper()
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	vmlinuz := must.Get(k.File("boot/vmlinuz-*"))(t)
	for name, size := range map[string]int64{"disk": 256 << 20, "report": 0, "console": 0} {
		must.Succeed(t, errors.Join(os.WriteFile(at(name), nil, 0o600), os.Truncate(at(name), size)))
	}
	must.Succeed(t, os.WriteFile(at("initrd"), im.Bytes(), 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, qemu, "-nodefaults", "-display", "none", "-no-reboot",
		// The guest's clocks count instructions of 2 ns each, so it loses no time to a busy host.
		"-icount", "shift=1,sleep=off", "-rtc", "clock=vm",
		"-machine", "q35", "-accel", "tcg", "-cpu", "max", "-smp", processors, "-m", "1G",
		"-kernel", vmlinuz, "-initrd", at("initrd"),
		"-append", "console=ttyS0 quiet panic=-1 cgroup_no_v1=all systemd.show_status=no systemd.log_target=console",
		"-drive", "if=none,id=disk,format=raw,file="+at("disk"), "-device", "virtio-blk-pci,drive=disk",
		"-serial", "file:"+at("console"), "-serial", "file:"+at("report"))
	out, err := cmd.CombinedOutput()
	read := func(name string) string {
		return strings.ReplaceAll(string(must.Get(os.ReadFile(at(name)))(t)), "\r", "")
	}
	report := read("report")
	if last := services[len(services)-1].name; err != nil || !strings.Contains(report, "end "+last+"\n") {
		t.Fatalf("%s: %v\n%s\nconsole: %s\nreport: %s", qemu, err, out, read("console"), report)
	}
	return report
}

var resultLine = regexp.MustCompile(`(?m)^ *--- (PASS|FAIL|SKIP): (\S+)`)

// check reports the result of each test of a service.
func (s *service) check(t *testing.T, output string) {
	passed := map[string]bool{}
	for _, m := range resultLine.FindAllStringSubmatch(output, -1) {
		if m[1] == "SKIP" {
			continue
		}
		passed[m[2]] = m[1] == "PASS"
		t.Run(m[2], func(t *testing.T) {
			expect.That(t, m[1] != "FAIL", "failed; the output of the service follows")
		})
	}
	for _, name := range s.want {
		expect.That(t, passed[name], "%s did not pass", name)
	}
	expect.That(t, strings.HasSuffix(output, "success\n") && !t.Failed(), "the service failed:\n%s", output)
}
