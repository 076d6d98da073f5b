// Flags of gpu_conformance that control the device test before use: --self-test 0,
// --self-test-parts and --graphs.
#ifndef MLA_TESTS_CONFORMANCE_SELF_TEST_FLAGS_H_
#define MLA_TESTS_CONFORMANCE_SELF_TEST_FLAGS_H_

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/hip/hip_backend.h"

namespace mla::conformance {

class SelfTestFlags {
 public:
  // Returns nothing for other flags, "" if the flag was taken, or else a description of valid
  // values.
  std::optional<std::string> Take(const std::string& name, const std::string& value) {
    if (name == "--self-test") {
      self_test_ = value != "0";
      return value == "0" || value == "1" ? "" : "0 or 1";
    }
    if (name == "--self-test-parts") return TakeParts(value);
    if (name != "--graphs") return std::nullopt;
    using kernels::hip::GraphUse;
    graphs_ = value == "on" ? GraphUse::kOn : value == "off" ? GraphUse::kOff : GraphUse::kAuto;
    return value == "on" || value == "off" || value == "auto" ? "" : "auto, on or off";
  }
  // Sets the options of the first backend that is made.
  void Apply(bool prints, kernels::hip::HipBackendOptions* options) const {
    options->self_test = self_test_;
    options->self_test_options.parts = parts_;
    options->self_test_options.most = std::chrono::hours(24);
    if (prints) options->self_test_options.on_part = Print;
    options->graphs = graphs_;
  }
  // Sets the options of later backends. They are not tested again, but use the first backend's
  // notes, which are printed.
  static void Keep(kernels::hip::HipBackend& made, kernels::hip::HipBackendOptions* options) {
    for (const kernels::BackendNote& note : made.Info().notes) {
      std::printf("%s: %s\n", note.name.c_str(), note.text.c_str());
    }
    using kernels::hip::GraphUse;
    options->self_test = false;
    options->reach_host = made.runtime().kernels_reach_host();
    options->graphs = made.runtime().uses_graphs() ? GraphUse::kOn : GraphUse::kOff;
  }

 private:
  std::string TakeParts(const std::string& value) {
    const auto known = kernels::hip::SelfTestParts();
    parts_ = absl::StrSplit(value, ',');
    const bool all = std::all_of(parts_.begin(), parts_.end(), [&known](const std::string& part) {
      return std::find(known.begin(), known.end(), part) != known.end();
    });
    std::string wanted = "of";
    for (const std::string_view one : known) absl::StrAppend(&wanted, " ", std::string(one));
    return all ? "" : wanted;
  }
  static void Print(std::string_view part, std::chrono::milliseconds so_far) {
    std::printf("self-test: %s, after %lld ms\n", std::string(part).c_str(),
                static_cast<long long>(so_far.count()));
    std::fflush(stdout);
  }

  bool self_test_ = true;
  std::vector<std::string> parts_;
  kernels::hip::GraphUse graphs_ = kernels::hip::GraphUse::kAuto;
};

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SELF_TEST_FLAGS_H_
