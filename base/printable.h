// Makes text from other parties safe for names, terminals and logs.
//
// Some characters are invisible, or change the text around them: control characters of ASCII and of
// ISO 8859 (C1), separators of lines, marks of direction, and all other format characters of
// Unicode. On a terminal they can hide or forge the output of a program.
#ifndef MLA_BASE_PRINTABLE_H_
#define MLA_BASE_PRINTABLE_H_

#include <string>
#include <string_view>

namespace mla::base {

// Returns true if the text is UTF-8 without such characters.
bool IsPrintable(std::string_view text);

// Returns the text with each such character as an escape in the notation of JSON, "\u202e", and
// with U+FFFD for bytes that are not UTF-8. Characters of ASCII in `kept` stay as they are.
std::string Printable(std::string_view text, std::string_view kept = {});

}  // namespace mla::base

#endif  // MLA_BASE_PRINTABLE_H_
