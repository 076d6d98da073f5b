#include "base/printable.h"

#include <gtest/gtest.h>

#include <string>

namespace mla::base {
namespace {

TEST(PrintableTest, TextOfManyScriptsIsPrintable) {
  for (const char* const text :
       {"", "deepseek-v3", "two words", "größe", "模型", "модель", "\U0001f600", "a\u0301"}) {
    EXPECT_TRUE(IsPrintable(text)) << text;
    EXPECT_EQ(Printable(text), text);
  }
}

TEST(PrintableTest, CharactersThatShowNothingAreEscaped) {
  const struct {
    const char* text;
    const char* shown;
  } cases[] = {
      {"a\nb", "a\\u000ab"},
      {"\x1b[31mred", "\\u001b[31mred"},
      {"\x7f", "\\u007f"},
      {"\u0085", "\\u0085"},      // C1: the next line
      {"\u009b2J", "\\u009b2J"},  // C1: begins a sequence of a terminal
      {"\u00ad", "\\u00ad"},
      {"\u061c", "\\u061c"},
      {"a\u200eb", "a\\u200eb"},
      {"\u2028", "\\u2028"},
      {"\u2029", "\\u2029"},
      {"gpj.\u202eexe", "gpj.\\u202eexe"},
      {"\u2066x\u2069", "\\u2066x\\u2069"},
      {"\ufeff", "\\ufeff"},
      {"\uffff", "\\uffff"},
      {"\U000e0041", "\\udb40\\udc41"},
      {"\U0001fffe", "\\ud83f\\udffe"},
  };
  for (const auto& one : cases) {
    EXPECT_FALSE(IsPrintable(one.text)) << one.shown;
    EXPECT_EQ(Printable(one.text), one.shown);
  }
  EXPECT_EQ(Printable(std::string("\0x", 2)), "\\u0000x");
  EXPECT_EQ(Printable("a\tb\nc", "\n"), "a\\u0009b\nc");
}

TEST(PrintableTest, BytesThatAreNoUtf8AreReplaced) {
  for (const char* const bytes : {"\x80", "\xc3", "\xe2\x82", "\xf0\x9f\x98", "\xc0\xaf",
                                  "\xe0\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xff"}) {
    EXPECT_FALSE(IsPrintable(bytes));
    const std::string shown = Printable(bytes);
    EXPECT_TRUE(IsPrintable(shown));
    EXPECT_EQ(shown.substr(0, 3), "\ufffd");
  }
  EXPECT_EQ(Printable("a\xff"
                      "b"),
            "a\ufffd"
            "b");
}

}  // namespace
}  // namespace mla::base
