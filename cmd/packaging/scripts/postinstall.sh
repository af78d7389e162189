#!/bin/sh
# SPDX-License-Identifier: Apache-2.0

# Makes the user of the services. Starts neither of them: which one it shall be, the package cannot know.
set -e

if ! getent group cloister > /dev/null; then
    groupadd --system cloister
fi
if ! getent passwd cloister > /dev/null; then
    useradd --system --gid cloister --no-create-home --home-dir /var/lib/cloister --shell /usr/sbin/nologin cloister
fi

# An AppArmor before version 4 does not understand the rule, and would refuse all profiles with it.
if [ -e /etc/apparmor.d/abi/4.0 ]; then
    cp /usr/share/cloister/apparmor/cloister /etc/apparmor.d/cloister
    if [ -e /proc/sys/kernel/apparmor_restrict_unprivileged_userns ] && command -v apparmor_parser > /dev/null; then
        apparmor_parser --replace --write-cache /etc/apparmor.d/cloister
    fi
fi

# Running services keep the old program until they are restarted, which drains them: that is the operator's to time.
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
