# SPDX-License-Identifier: Apache-2.0
# JSON with sorted keys.
# Needs: python3
/usr/bin/python3 -c 'import json; json.dump({k: len(k) for k in {"alpha", "beta", "gamma"}}, open("out", "w"), sort_keys=True)'
