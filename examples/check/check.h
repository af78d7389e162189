// SPDX-License-Identifier: Apache-2.0

// A test is a program that calls these macros and returns check::Failures().
#ifndef EXAMPLES_CHECK_CHECK_H_
#define EXAMPLES_CHECK_CHECK_H_

#include <string>

namespace check {

// Records that `what`, at `line` of `file`, does not hold, and `why`.
void Fail(const char* file, int line, const char* what, const std::string& why);

// The number of failures so far, limited to the range of an exit code.
int Failures();

inline std::string Show(bool v) { return v ? "true" : "false"; }
inline std::string Show(char v) { return std::string("'") + v + "'"; }
inline std::string Show(const std::string& v) { return '"' + v + '"'; }
inline std::string Show(const char* v) { return Show(std::string(v)); }
template <typename T>
std::string Show(const T& v) {
  return std::to_string(v);
}

}  // namespace check

#define CHECK(cond) \
  if (!(cond)) check::Fail(__FILE__, __LINE__, #cond, "")

#define CHECK_EQ(got, want)                                                                     \
  do {                                                                                          \
    const auto& got_ = (got);                                                                   \
    const auto& want_ = (want);                                                                 \
    if (!(got_ == want_))                                                                       \
      check::Fail(__FILE__, __LINE__, #got, "got " + check::Show(got_) + ", want " + check::Show(want_)); \
  } while (false)

#endif  // EXAMPLES_CHECK_CHECK_H_
