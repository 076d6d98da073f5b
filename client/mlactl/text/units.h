// Writes and reads numbers with units, for people.
#ifndef MLA_CLIENT_MLACTL_TEXT_UNITS_H_
#define MLA_CLIENT_MLACTL_TEXT_UNITS_H_

#include <cstdint>
#include <string>

namespace mla::mlactl {

std::string BytesForPeople(double bytes);    // "1.50 GiB", "512 B"
std::string CountForPeople(double count);    // "1234", "163.8k", "3.64M"
std::string MillisForPeople(double millis);  // "12 ms", "4.2 s", "3 min 20 s", "2 h 5 min"
// Returns the text of a number, by the name of its field: bytes, milliseconds and microseconds with
// units, else digits.
std::string FieldForPeople(const std::string& name, uint64_t value);
// Returns the bytes of a size such as "4GiB", "288GB" or "1024", or 0 if `text` is not a size.
uint64_t SizeOf(const std::string& text);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_TEXT_UNITS_H_
