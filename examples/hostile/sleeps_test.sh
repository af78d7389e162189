#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Sleeps far beyond any timeout, and leaves behind a child in a session of its own, which no signal to
# the test's process group reaches.
echo "sleeping as ${HOSTILE_TOKEN:?}"
setsid bash -c 'trap "" TERM; while :; do sleep 1; done' "$HOSTILE_TOKEN" &
trap "" TERM
while :; do sleep 1; done
