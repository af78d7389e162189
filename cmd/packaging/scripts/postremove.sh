#!/bin/sh
# SPDX-License-Identifier: Apache-2.0

# Keeps the state directories and their user: a store may be worth days of building, and a reused user id would get access
# to it.
set -e

if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
