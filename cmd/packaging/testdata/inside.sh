#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs in the system that boot.sh boots. Says in lines of "KEY: VALUE" how the package fares there.
set -uo pipefail

work=/run/trial # of the host: no file in it is one of the system

wait_for() { # wait_for SECONDS COMMAND...
    local n=$(($1 * 10))
    shift
    while ! "$@" && [ $((n -= 1)) -gt 0 ]; do sleep 0.1; done
}
show() { systemctl show cloister -p "$1" --value; }
# Logs, the package manager's own records, and the list of users grow with each package that is installed.
files() {
    find / -xdev \( -path /var/log -o -path /var/lib/dpkg -o -path /var/cache -o -path /var/lib/systemd -o -path /tmp -o -path /var/tmp \) -prune \
        -o -path '/etc/*-' -o -path '/etc/.pwd.lock' -o -print | sort
}
as_cloister() { setpriv --reuid cloister --regid cloister --clear-groups env HOME=/nonexistent "$@"; }

files > $work/before

dpkg -i $work/cloister.deb > $work/dpkg 2>&1 || cat $work/dpkg
echo "installed: $(dpkg-query -W -f '${Status}' cloister)"
echo "after install: $(systemctl is-active cloister cloister-join | xargs) $(systemctl is-enabled cloister cloister-join 2>&1 | xargs)"
echo "version: $(cloister version)"
echo "check: $(as_cloister cloister check | grep '^tier')"
as_cloister cloister run -- /bin/true
echo "run: $?"

systemctl start cloister || journalctl --no-pager -u cloister
echo "after start: $(systemctl is-active cloister)"
pid=$(show MainPID)
echo "user: $(ps -o user= -p "$pid" 2> /dev/null || stat -c %U "/proc/$pid")"
echo "status: $(show StatusText)"
journal() { journalctl --no-pager -u cloister > $work/journal 2>&1; grep -q 'bazel    build' $work/journal; }
wait_for 20 journal
echo "tier: $(grep -o 'sandbox  .*' $work/journal | head -n 1)"
exec 3<> /dev/tcp/127.0.0.1/8982 && printf 'GET /ready HTTP/1.0\r\n\r\n' >&3
echo "ready: $(timeout 10 tail -n 1 <&3)"
exec 3>&-
echo "state: $(stat -c '%U:%G %a %n' /var/lib/cloister)"
echo "controllers: $(cat /sys/fs/cgroup/cgroup.controllers)"
echo "group: $(grep '^0::' "/proc/$pid/cgroup" | cut -d : -f 3)"
echo "delegated: $(stat -c '%U %n' /sys/fs/cgroup/system.slice/cloister.service)"
echo "limits: $(grep -q 'not enforced.*memory limit' $work/journal && echo off || echo ok)"

# Stuck: it can give no signs of life, and answer to nothing.
mkdir -p /run/systemd/system/cloister.service.d
printf '[Service]\nWatchdogSec=6\n' > /run/systemd/system/cloister.service.d/test.conf
systemctl daemon-reload
systemctl restart cloister
pid=$(show MainPID)
kill -STOP "$pid"
again() { [ "$(show NRestarts)" -ge 1 ] && [ "$(show MainPID)" != "$pid" ] && [ "$(systemctl is-active cloister)" = active ]; }
wait_for 60 again
echo "restarted: $([ "$(show NRestarts)" -ge 1 ] && echo yes || echo "no: $(show Result)")"
restarts=$(show NRestarts)
sleep 7 # longer than the watchdog waits
echo "after restart: $(systemctl is-active cloister), $(($(show NRestarts) - restarts)) more"
rm -r /run/systemd/system/cloister.service.d

printf 'version: 1\nlisten: 127.0.0.1:8989\n' > /etc/cloister/config.yaml
dpkg -i $work/cloister.deb > $work/dpkg 2>&1 || cat $work/dpkg
echo "configuration: $(grep -q 8989 /etc/cloister/config.yaml && echo kept || echo lost)"

systemctl stop cloister
echo "result: $(show Result) $(show ExecMainStatus)"

echo 'bogus: true' >> /etc/cloister/config.yaml
systemctl start cloister 2> /dev/null
failed() { [ "$(systemctl is-failed cloister)" = failed ]; }
wait_for 40 failed
echo "mistake: $(systemctl is-failed cloister)"

echo 'version: 1' > /etc/cloister/config.yaml
echo 'CLOISTER_FLAGS="--auth /etc/cloister/auth.yaml"' > /etc/cloister/serve.env # of an earlier package
systemctl reset-failed cloister
systemctl start cloister 2> /dev/null
wait_for 40 failed
echo "former flags: $(systemctl is-failed cloister) $(journalctl --no-pager -u cloister | grep -o 'CLOISTER_FLAGS has no effect' | uniq)"

dpkg --purge cloister > $work/dpkg 2>&1
code=$?
[ $code = 0 ] || cat $work/dpkg
echo "removed: $code"
rm -rf /var/lib/cloister/* # what is in the store is the store's
files > $work/after
echo "after removal: $(comm -13 $work/before $work/after | xargs)"
echo end
