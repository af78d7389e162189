// SPDX-License-Identifier: Apache-2.0

#include "examples/store/arena.h"

#include <string>

#include "examples/check/check.h"

int main() {
  store::Arena arena;
  std::string source = "gone";
  const std::string_view kept = arena.Copy(source);
  source = "here";
  const std::string large(10000, 'x');
  CHECK(arena.Copy(large) == large);
  CHECK(arena.Copy("").empty());
  CHECK(kept == "gone");
  return check::Failures();
}
