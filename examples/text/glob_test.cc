// SPDX-License-Identifier: Apache-2.0

#include "examples/text/glob.h"

#include "examples/check/check.h"

int main() {
  CHECK(text::Glob("*.cc", "glob.cc"));
  CHECK(text::Glob("a*b*c", "aXbYbZc"));
  CHECK(text::Glob("?", "x") && !text::Glob("?", ""));
  CHECK(text::Glob("**", ""));
  CHECK(!text::Glob("*.h", "glob.cc"));
  return check::Failures();
}
