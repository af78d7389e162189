// SPDX-License-Identifier: Apache-2.0

#include "examples/text/escape.h"

#include <cstdio>

namespace text {

std::string Quote(std::string_view s) {
  std::string q = "\"";
  for (char c : s) {
    char octal[5];
    if (c == '"' || c == '\\') {
      q += {'\\', c};
    } else if (c == '\n') {
      q += "\\n";
    } else if (c < ' ' || c > '~') {
      // Octal, because a hexadecimal escape would swallow the digits that follow it.
      std::snprintf(octal, sizeof octal, "\\%03o", static_cast<unsigned char>(c));
      q += octal;
    } else {
      q += c;
    }
  }
  return q + '"';
}

}  // namespace text
