// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/functions.h"

#include "examples/text/distance.h"

namespace calc {
namespace {

constexpr Function kFunctions[] = {
    {"max", [](double a, double b) { return a > b ? a : b; }},
    {"min", [](double a, double b) { return a < b ? a : b; }},
    {"mean", [](double a, double b) { return (a + b) / 2; }},
};
constexpr int kCount = sizeof kFunctions / sizeof kFunctions[0];

}  // namespace

int FindFunction(std::string_view name) {
  for (int i = 0; i < kCount; i++) {
    if (kFunctions[i].name == name) return i;
  }
  return -1;
}

const Function& FunctionOf(int number) { return kFunctions[number]; }

std::string_view Suggest(std::string_view name) {
  std::string_view best = kFunctions[0].name;
  for (const Function& f : kFunctions) {
    if (text::Distance(name, f.name) < text::Distance(name, best)) best = f.name;
  }
  return best;
}

}  // namespace calc
