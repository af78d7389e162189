// SPDX-License-Identifier: Apache-2.0

#include "examples/text/escape.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(text::Quote("a\"b\\"), "\"a\\\"b\\\\\"");
  CHECK_EQ(text::Quote("\n\x01\xff"), "\"\\n\\001\\377\"");
  return check::Failures();
}
