#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
echo text > text
gzip -k text
mv text.gz out
