#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Sleeps far beyond any timeout, and leaves a child in another session, which signals to the test's process
# group do not reach.
echo "sleeping as ${HOSTILE_TOKEN:?}"
setsid bash -c 'trap "" TERM; while :; do sleep 1; done' "$HOSTILE_TOKEN" &
trap "" TERM
while :; do sleep 1; done
