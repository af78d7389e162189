// SPDX-License-Identifier: Apache-2.0

#include "examples/pages/titles.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(pages::Title1(), std::string("Starting"));
  CHECK_EQ(pages::Title2(), std::string("Building"));
  CHECK_EQ(pages::Title3(), std::string("Asking why"));
  return check::Failures();
}
