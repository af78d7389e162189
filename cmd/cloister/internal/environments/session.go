// SPDX-License-Identifier: Apache-2.0

package environments

import "strings"

// sessionArgs returns the command line of a shell script that begins with the working directory and the exported
// variables of the last such script, which are saved in /tmp/.cloister-session. If the directory no longer exists, the
// script begins in the sandbox's working directory. The variables env override those of the session. A script that is
// killed leaves the session as it was. Commands of a sandbox are not protected from each other, so any of them can
// change the session.
func sessionArgs(args, env []string) []string {
	var names []string
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		names = append(names, name)
	}
	return append([]string{"/bin/sh", "-c", chooseShell, runSession, strings.Join(names, " ")}, args...)
}

// chooseShell prefers bash. The variables of the session do not matter yet.
const chooseShell = `exec "$(command -v bash || command -v sh)" -c "$0" session "$@"`

// runSession is a script with the arguments NAMES SCRIPT [ARG]..., where NAMES are identifiers.
const runSession = `
for _n in $1; do eval "_cloister_$_n=\$$_n"; done
if [ -r /tmp/.cloister-session ]; then
	. /tmp/.cloister-session 2> /dev/null
	cd "$_CLOISTER_DIR" 2> /dev/null || {
		cd . # the session has set PWD
		echo "cloister: cannot enter $_CLOISTER_DIR; the script begins in $PWD" >&2
	}
fi
for _n in $1; do eval "export $_n=\"\$_cloister_$_n\"; unset _cloister_$_n"; done
unset _n _CLOISTER_DIR
trap '
	set -- $?
	export _CLOISTER_DIR="$PWD"
	export -p > /tmp/.cloister-session.$$ && command -p mv -f /tmp/.cloister-session.$$ /tmp/.cloister-session
	exit $1' EXIT
_cloister_script=$2
shift 2
eval "$_cloister_script"
`
