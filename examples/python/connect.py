# SPDX-License-Identifier: Apache-2.0
"""Tries to fetch a page, like a test that expects a network."""

import sys
import urllib.error
import urllib.request

URL = "http://192.0.2.1/"  # an address for documentation (RFC 5737), so no name is resolved

try:
    urllib.request.urlopen(URL, timeout=10)
except urllib.error.URLError as error:
    sys.exit(f"cannot fetch {URL}: {error.reason}")
print("fetched")
