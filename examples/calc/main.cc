// SPDX-License-Identifier: Apache-2.0

// Prints the value of each argument, an expression; x is 0.
#include <cstdio>
#include <string>

#include "examples/calc/evaluate.h"
#include "examples/text/number.h"

int main(int argc, char** argv) {
  int status = 0;
  for (int i = 1; i < argc; i++) {
    double value;
    std::string error;
    if (calc::Evaluate(argv[i], 0, &value, &error)) {
      std::printf("%s\n", text::FormatDecimal(value).c_str());
    } else {
      std::fprintf(stderr, "calc: %s: %s\n", argv[i], error.c_str());
      status = 1;
    }
  }
  return status;
}
