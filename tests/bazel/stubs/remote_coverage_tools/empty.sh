#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
for option; do
  case $option in
    --output_file=*) : > "${option#--output_file=}" ;;
  esac
done
