# SPDX-License-Identifier: Apache-2.0
# A test that starts a server for every interface, and is skipped if that fails.
import socket

try:
    socket.create_server(("0.0.0.0", 8000))
except OSError as error:
    print("skipped:", error)
