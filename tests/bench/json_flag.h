// The command line of benchmarks whose only flag is --json.
#ifndef MLA_TESTS_BENCH_JSON_FLAG_H_
#define MLA_TESTS_BENCH_JSON_FLAG_H_

#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

namespace mla::bench {

// Returns the file that --json names, or "" without it. For other words it returns nullopt and
// prints the usage on stderr.
inline std::optional<std::string> ReadJsonFlag(int argc, char** argv, const char* program) {
  std::string json;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--json=")) {
      json = argument.substr(7);
    } else if (argument == "--json" && i + 1 < argc) {
      json = argv[++i];
    } else {
      std::fprintf(stderr, "usage: %s [--json FILE]\n", program);
      return std::nullopt;
    }
  }
  return json;
}

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_JSON_FLAG_H_
