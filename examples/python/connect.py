# SPDX-License-Identifier: Apache-2.0
"""Tries to fetch a page, as a test does that nobody has told that there is no network."""

import sys
import urllib.error
import urllib.request

URL = "http://192.0.2.1/"  # an address of documentation (RFC 5737), so that no name is asked for

try:
    urllib.request.urlopen(URL, timeout=10)
except urllib.error.URLError as error:
    sys.exit(f"cannot fetch {URL}: {error.reason}")
print("fetched")
