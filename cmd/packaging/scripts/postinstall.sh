#!/bin/sh
# SPDX-License-Identifier: Apache-2.0

# Creates the services' user. Starts neither service, since the operator chooses one.
set -e

if ! getent group cloister > /dev/null; then
    groupadd --system cloister
fi
if ! getent passwd cloister > /dev/null; then
    useradd --system --gid cloister --no-create-home --home-dir /var/lib/cloister --shell /usr/sbin/nologin cloister
fi

# AppArmor before version 4 does not know the rule and would refuse the profile.
if [ -e /etc/apparmor.d/abi/4.0 ]; then
    cp /usr/share/cloister/apparmor/cloister /etc/apparmor.d/cloister
    if [ -e /proc/sys/kernel/apparmor_restrict_unprivileged_userns ] && command -v apparmor_parser > /dev/null; then
        apparmor_parser --replace --write-cache /etc/apparmor.d/cloister
    fi
fi

# Running services keep the old program until the operator restarts them, which drains them.
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
