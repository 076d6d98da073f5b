// Values of options, checked. Every fault is kept, so that all of them are told at once:
//
//   OptionReader reader(arguments);
//   reader.Number("batch", 1, 4096, &batch);
//   reader.Choice("mode", {"fast", "exact"}, &mode);
//   if (!reader.status().ok()) ...   // "--batch: got \"0\", must be 1..4096" a line
//
// An option that was not given leaves its variable as it is. Threading: none.
#ifndef MLA_CLIENT_MLACTL_CLI_OPTION_READER_H_
#define MLA_CLIENT_MLACTL_CLI_OPTION_READER_H_

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "client/mlactl/cli/command_line.h"

namespace mla::mlactl {

class OptionReader final {
 public:
  explicit OptionReader(const Arguments& arguments) : arguments_(arguments) {}

  template <typename Integer>
  void Number(std::string_view name, uint64_t least, uint64_t most, Integer* value) {
    std::vector<uint64_t> read;
    Numbers(name, least, most, 1, &read);
    if (!read.empty()) *value = static_cast<Integer>(read[0]);
  }
  // Separated by commas; at most `count` of them.
  void Numbers(std::string_view name, uint64_t least, uint64_t most, size_t count,
               std::vector<uint64_t>* values);
  void Real(std::string_view name, double least, double most, double* value);
  void Reals(std::string_view name, double least, double most, size_t count,
             std::vector<double>* values);
  void Choice(std::string_view name, const std::vector<std::string>& choices, std::string* value);
  // Separated by commas; "all" stands for all of them.
  void Choices(std::string_view name, const std::vector<std::string>& choices,
               std::vector<std::string>* values);
  void Fault(std::string_view name, std::string_view got, std::string_view must);

  absl::Status status() const;

 private:
  std::vector<std::string> Parts(std::string_view name, size_t count);

  const Arguments& arguments_;
  std::vector<std::string> faults_;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_OPTION_READER_H_
