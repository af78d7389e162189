// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/luhn.h"

#include "examples/check/check.h"

int main() {
  CHECK(hash::ValidLuhn("79927398713"));
  CHECK(!hash::ValidLuhn("79927398710"));
  CHECK(!hash::ValidLuhn("0") && !hash::ValidLuhn("") && !hash::ValidLuhn("1 8"));
  return check::Failures();
}
