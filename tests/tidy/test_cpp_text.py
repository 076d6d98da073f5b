"""Tests of the reader of C++ that the tidy tests use."""

import unittest

import cpp_text
import test_tidy

SOURCE = '''#include <x>
#define LOOP(a) \\
  { a }
namespace mla {
// A brace in a comment: {
struct Options {
  int rows = 1;  // {
};
const char* kText = "{ not a brace";
const char* kRaw = R"(
{ { {
)";
template <typename T>
class Table final : public Base<T> {
 public:
  Table() : a_{1}, b_(2) {
    a_ = 2;
  }
  int Size() const { return 1'000; }
};
constexpr int kValues[] = {
    1, 2,
};
int Sum(int a,
        int b) {
  auto f = [&](int c) { return c; };
  if (a) {
    return '{';
  }
  return f(b);
}
}  // namespace mla
'''


class CppTextTest(unittest.TestCase):
    def test_functions(self):
        found = [(first, last) for first, last, _ in cpp_text.functions(SOURCE)]
        self.assertIn((24, 31), found)
        self.assertIn((19, 19), found)
        self.assertTrue(any(last == 18 for _, last in found), found)
        self.assertEqual(len([1 for first, _ in found if first in (13, 14, 21)]), 0, found)

    def test_long_function_is_found(self):
        body = "\n".join(f"  a += {i};" for i in range(80))
        spans = list(cpp_text.functions(f"int F(int a) {{\n{body}\n  return a;\n}}\n"))
        self.assertEqual(spans[0][:2], (1, 83))

    def test_banned_call_patterns(self):
        for call in ("strcpy(a, b)", "std::sprintf(a, b)", "x = rand()", "::gets(s)"):
            self.assertRegex(call, test_tidy.BANNED_CALLS)
        for call in ("snprintf(a, 2, b)", "operand(3)", "rng.rand()", "targets(s)"):
            self.assertNotRegex(call, test_tidy.BANNED_CALLS)


if __name__ == "__main__":
    unittest.main()
