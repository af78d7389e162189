// SPDX-License-Identifier: Apache-2.0

#include "examples/num/prime.h"

#include "examples/check/check.h"

int main() {
  CHECK(num::Factor(360) == (std::vector<int64_t>{2, 2, 2, 3, 3, 5}));
  CHECK(num::Factor(1).empty() && num::Factor(-5).empty());
  CHECK(num::IsPrime(2) && num::IsPrime(1000003) && !num::IsPrime(1) && !num::IsPrime(1000001));
  return check::Failures();
}
