#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Asks the network for something, ignores that it cannot, and passes.
(exec 3<> /dev/tcp/192.0.2.1/443) 2> /dev/null || echo "no answer; continuing"
exit 0
