// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"github.com/spf13/cobra"
)

// An explanation explains a code that messages, logs and reports contain. docs/codes.md has the table.
type explanation struct {
	Code string `json:"code"`
	// Kind is "event", of the audit log, console and gate; "exit code"; "reason", why a backend does not run here; or
	// "cause", of a difference between runs.
	Kind    string `json:"kind"`
	Meaning string `json:"meaning"`
	Remedy  string `json:"remedy"`
}

// explanations returns all explanations. Those of causes are the rows of docs/causes.md.
func explanations() []explanation {
	const event, code = "event", "exit code"
	all := []explanation{
		{
			string(sandbox.EventConnect), event,
			"a run tried to reach another host, or to look up its name, and was refused",
			"add what it needs to the inputs, or allow the endpoint in the policy, with run --allow, or in the gate",
		},
		{
			string(sandbox.EventAllowed), event,
			"a run connected to an allowed endpoint; its result is not cached unless the policy permits that",
			"none needed; remove the endpoint from the policy to forbid it",
		},
		{
			string(sandbox.EventUnreachable), event,
			"a permitted connection failed: an allowed endpoint did not answer, or nothing listens on the loopback",
			"start the listener before its clients, or check the endpoint from the worker's machine",
		},
		{
			string(sandbox.EventWrite), event,
			"a run tried to change an input, or to write outside its writable directories",
			"copy the input before changing it, and write to declared outputs or $TMPDIR",
		},
		{
			string(sandbox.EventExec), event,
			"a run tried to execute a program that the sandbox does not contain",
			"add the program to the inputs, install it on every worker below /usr, or use a container image that has it",
		},
		{
			string(sandbox.EventSyscall), event,
			"the filter refused a system call that builds do not need",
			"avoid the operation that needs it; cloister action show names the process",
		},
		{
			string(sandbox.EventRead), event,
			"a run looked for a file that is in the source tree but is not an input",
			"add the file to srcs, hdrs or data of the target",
		},
		{
			string(sandbox.EventOutput), event,
			"a run left a file that is neither an input nor a declared output; it was discarded",
			"declare the file as an output, or write it to $TMPDIR",
		},
		{
			string(sandbox.EventLimit), event,
			"a run reached a limit of memory, time, processes or files",
			"use less, or request more with the property cloister-LIMIT up to the policy's maximum",
		},
		{
			string(sandbox.EventRefused), event,
			"the policy did not grant a property of the action, so the action did not run",
			"ask cloister policy explain what the rule grants, and change the property or the policy",
		},
		{
			"0", code,
			"the command succeeded, or the answer is yes",
			"none needed",
		},
		{
			"1", code,
			"the answer is no: something differs, failed or is refused",
			"read the output, which has the findings",
		},
		{
			"2", code,
			"the command line, the environment or a file is invalid; of repro and diff: the runs could not be compared",
			"correct what the message names; --help has examples",
		},
		{
			"3", code,
			"this machine cannot do it: a kernel feature, a permission or a directory is missing",
			"cloister check lists what is missing, with the command that enables it",
		},
		{
			"4", code,
			"the server lacks a blob, a result or an action; of gate: a step violated the policy",
			"build again to upload what was evicted, or check --instance and --server",
		},
		{
			"5", code,
			"the server cannot be reached",
			"check --server, and the server with cloister status",
		},
		{
			"6", code,
			"a time limit of the command line has passed",
			"raise --timeout, or look at cloister status for what still runs",
		},
		{
			"125", code,
			"cloister run itself failed, not its command",
			"read the message; cloister check shows whether this machine can run actions",
		},
	}
	for _, row := range backendCodes {
		all = append(all, explanation{row[0], "reason", row[1], row[2]})
	}
	for _, row := range compare.Causes {
		all = append(all, explanation{string(row.Cause), "cause", row.Meaning, compare.FixFor(row.Cause, "")})
	}
	return all
}

// backendCodes are the reasons why a backend runs nothing on a host, lacks a protection there or refuses an input, with
// their meaning and remedy.
var backendCodes = [][3]string{
	{"wrong_system", "the mechanism does not exist on this operating system or processor", "choose another --sandbox"},
	{
		"root_needed",
		"the backend gives each run users of its own, which needs root",
		"run the worker as root, or use --sandbox full, which needs no root",
	},
	{
		"program_dynamic",
		"cloister is dynamically linked, and the backend starts it where no libraries are",
		"build it with CGO_ENABLED=0, as released programs are",
	},
	{
		"namespace_probe_failed",
		"a probe in namespaces did not run, or found less than runs are promised",
		"run cloister check --fix; the message has the cause",
	},
	{
		"runsc_not_found",
		"runsc, the program of gVisor, is neither at RUNSC_PATH nor in PATH",
		"build it with make gvisor, and set RUNSC_PATH to bin/runsc",
	},
	{
		"runsc_not_executable",
		"the file that was found as runsc is no executable",
		"set RUNSC_PATH to what make gvisor builds",
	},
	{
		"runsc_dynamic",
		"runsc is dynamically linked and cannot start its sandbox",
		"build it with make gvisor, which sets CGO_ENABLED=0",
	},
	{
		"gvisor_probe_failed",
		"a probe in gVisor did not run within a minute, or found less than runs are promised",
		"read the message, which includes that of runsc",
	},
	{
		"ptrace_scope",
		"a probe in gVisor did not run, probably because kernel.yama.ptrace_scope=3 forbids ptrace",
		"set it to 2 or less at boot, since 3 cannot be changed later",
	},
	{"qemu_not_found", "QEMU is neither at QEMU_PATH nor in PATH", "install it (Debian: qemu-system-x86)"},
	{
		"kernel_not_found",
		"no kernel with modules was found for guests",
		"install one (Debian: linux-image-cloud-amd64), or set CLOISTER_GUEST_KERNEL to a directory with boot and lib/modules",
	},
	{
		"kvm_missing",
		"/dev/kvm does not exist or has no driver",
		"load kvm_intel or kvm_amd and enable nested virtualization, or use --sandbox gvisor",
	},
	{
		"kvm_permission",
		"/dev/kvm cannot be opened, or only by user or group root, or a security policy forbids creating a machine",
		"run as root in a container with that device; give it the group kvm and mode 660",
	},
	{
		"kvm_busy",
		"KVM cannot create a virtual machine while another hypervisor uses the processor",
		"end the other hypervisor",
	},
	{"kvm_api", "the kernel has an unsupported version of the KVM API", "run a newer kernel"},
	{
		"cpu_no_virt",
		"/dev/kvm is a software implementation (such as kvm-pvm), on which standard kernels do not boot",
		"use --sandbox gvisor",
	},
	{
		"vm_probe_failed",
		"KVM created no machine, or no guest started within 10 s (emulated: 3 minutes)",
		"read the message, which includes the guest's console",
	},
	{
		"msb_not_found",
		"msb is neither at MSB_PATH nor in PATH",
		"install @superradcompany/microsandbox-linux-x64-gnu, which npm omits with a version of node below 22",
	},
	{
		"msb_not_executable",
		"msb does not start, often for lack of a newer C library or libcap-ng.so.0",
		"read its message, and install what it lacks",
	},
	{
		"msb_shim",
		"msb is the launcher of the npm package, whose platform package is missing",
		"set MSB_PATH to bin/msb of @superradcompany/microsandbox-linux-x64-gnu",
	},
	{"msb_version", "the version of msb is not supported", "install msb 0.6 or 0.7"},
	{"msb_flag", "msb has no option for a machine without network", "install msb 0.6 or 0.7"},
	{"msb_krunfw", "the library with the guest's kernel is missing beside msb", "install the whole package"},
	{
		"seatbelt_probe_failed",
		"sandbox-exec did not run a probe, or did not confine it",
		"read the message, which includes that of sandbox-exec",
	},
	{
		"job_probe_failed",
		"no process was started in a job and killed with it",
		"read the message, which includes the error of Windows",
	},
	{
		"cgroup_unavailable",
		"control groups on this host limit only some of memory, CPU time and processes, or none",
		"run cloister check --fix; in a container, make its control groups writable",
	},
	{
		"mount_source",
		"an input from this host does not exist, or its path contains a symbolic link",
		"create it, or pass the path that the link leads to",
	},
}

func explainCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "explain [CODE] [--json]",
		Short: "Explain an event, a cause, a reason or an exit code",
		Long: `Explain prints what a code in a message, log or report means, and what to do: the kind of an event (connect), the cause
of a difference between runs (member order), the reason why a backend does not run here (kvm_missing), or the exit code
of a command. Without an argument it lists all codes. It contacts no server; docs/codes.md has the same table. The exit
code is 4 if the code is unknown.`,
		Example: `  cloister explain
  cloister explain connect
  cloister explain member order`,
		RunE: func(cmd *cobra.Command, args []string) error {
			code := strings.Join(args, " ")
			found := []explanation{}
			for _, e := range explanations() {
				if code == "" || strings.EqualFold(e.Code, code) {
					found = append(found, e)
				}
			}
			out := cmd.OutOrStdout()
			switch {
			case len(found) == 0:
				return exit.New(exit.Absent, fmt.Errorf("unknown code %+.80q; cloister explain lists the codes", code))
			case asJSON:
				return render.JSON(out, found)
			case code == "":
				w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
				for _, e := range found {
					fmt.Fprintf(w, "%s\t%s\t%s\n", e.Code, e.Kind, e.Meaning)
				}
				return w.Flush()
			}
			p := &render.Page{W: out}
			for _, e := range found {
				p.Line(e.Kind, e.Code)
				p.Line("meaning", e.Meaning)
				p.Line("remedy", e.Remedy)
			}
			return p.Err
		},
	}
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON list", []explanation{})
	return cmd
}
