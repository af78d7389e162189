// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/hex.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(hash::ToHex("\x01\xfe"), "01fe");
  std::string s = "untouched";
  CHECK(!hash::FromHex("0", &s) && !hash::FromHex("0g", &s) && !hash::FromHex("0A", &s));
  CHECK_EQ(s, "untouched");
  CHECK(hash::FromHex("636174", &s));
  CHECK_EQ(s, "cat");
  return check::Failures();
}
