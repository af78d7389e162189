// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/base64.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(hash::ToBase64(""), "");
  CHECK_EQ(hash::ToBase64("f"), "Zg==");
  CHECK_EQ(hash::ToBase64("fo"), "Zm8=");
  CHECK_EQ(hash::ToBase64("foobar"), "Zm9vYmFy");
  CHECK_EQ(hash::ToBase64("\xff\xff\xff"), "////");
  return check::Failures();
}
