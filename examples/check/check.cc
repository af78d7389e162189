// SPDX-License-Identifier: Apache-2.0

#include "examples/check/check.h"

#include <cstdio>

namespace check {
namespace {
int failures = 0;
}

void Fail(const char* file, int line, const char* what, const std::string& why) {
  ++failures;
  std::fprintf(stderr, "%s:%d: %s%s%s\n", file, line, what, why.empty() ? "" : ": ", why.c_str());
}

int Failures() { return failures < 100 ? failures : 100; }

}  // namespace check
