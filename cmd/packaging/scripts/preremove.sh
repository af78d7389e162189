#!/bin/sh
# SPDX-License-Identifier: Apache-2.0

# Stops the services, which drain first, unless another version replaces this one.
set -e

case "$1" in
    upgrade | 1) exit 0 ;; # dpkg's and rpm's argument
esac
if [ -d /run/systemd/system ]; then
    systemctl disable --now cloister.service cloister-join.service
fi
if [ -e /etc/apparmor.d/cloister ]; then
    if [ -e /sys/kernel/security/apparmor/profiles ] && command -v apparmor_parser > /dev/null; then
        apparmor_parser --remove /etc/apparmor.d/cloister || echo "cloister: its AppArmor profile stays loaded until the next boot" >&2
    fi
    rm -f /etc/apparmor.d/cloister
fi
