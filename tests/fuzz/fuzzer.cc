#include "tests/fuzz/fuzzer.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace mla::fuzz {
namespace {

// One bit for each pair of places in the code that followed each other, hashed.
constexpr size_t kEdges = size_t{1} << 16;
std::bitset<kEdges> edges_of_run;
uintptr_t previous_place = 0;
bool any_edge = false;

// What the signal handler needs: it may not allocate.
const std::string* current_input = nullptr;
char crash_file[512];

void OnCrash(int signal_number) {
  if (current_input != nullptr) {
    const int file = open(crash_file, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ssize_t written = file < 0 ? -1 : write(file, current_input->data(), current_input->size());
    constexpr char kWhat[] = "fuzz: crashed; the input is in ";
    written = write(STDERR_FILENO, kWhat, sizeof(kWhat) - 1);
    written = write(STDERR_FILENO, crash_file, std::strlen(crash_file));
    written = write(STDERR_FILENO, "\n", 1);
    static_cast<void>(written);
  }
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

void CatchCrashes(const std::string& name) {
  const char* folder = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR");
  std::snprintf(crash_file, sizeof(crash_file), "%s/crash-%s", folder == nullptr ? "." : folder,
                name.c_str());
  // Sanitizers report first and then abort.
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) signal(number, OnCrash);
}

class Mutator {
 public:
  Mutator(uint64_t seed, size_t most) : random_(seed), most_(most) {}

  const std::string& Pick(const std::vector<std::string>& pool) {
    return pool[random_() % pool.size()];
  }

  std::string Mutate(const std::vector<std::string>& pool) {
    std::string input = Pick(pool);
    for (uint64_t n = 1 + random_() % 4; n > 0; --n) Once(pool, &input);
    if (input.size() > most_) input.resize(most_);
    return input;
  }

 private:
  size_t Place(const std::string& input) {
    return input.empty() ? 0 : random_() % (input.size() + 1);
  }

  void Once(const std::vector<std::string>& pool, std::string* input) {
    // Lengths, counts and text that parsers trip over.
    static const std::string kTokens[] = {{'\0'},
                                          "\xff",
                                          "\x7f",
                                          "\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
                                          "\xff\xff\xff\xff\x0f",
                                          "\xfa\x7f",
                                          "\x0b",
                                          "\"",
                                          "{",
                                          "}",
                                          "[",
                                          "]",
                                          ": ",
                                          "\n",
                                          "-1",
                                          "1e309",
                                          "\xc3\x28",
                                          "&a *a",
                                          "99999999999999999999",
                                          "GiB"};
    const size_t at = Place(*input);
    const size_t left = input->size() - at;
    switch (random_() % 8) {
      case 0:
        if (left > 0) (*input)[at] = static_cast<char>((*input)[at] ^ (1 << random_() % 8));
        break;
      case 1:
        if (left > 0) (*input)[at] = static_cast<char>(random_());
        break;
      case 2:
        input->insert(at, kTokens[random_() % std::size(kTokens)]);
        break;
      case 3:
        input->erase(at, 1 + random_() % 8);
        break;
      case 4:
        input->insert(at, input->substr(at, 1 + random_() % 32));
        break;
      case 5: {
        const std::string& other = Pick(pool);
        input->replace(at, random_() % (left + 1), other.substr(Place(other)));
        break;
      }
      case 6:
        input->resize(at);
        break;
      default: {
        const std::string& token = kTokens[random_() % std::size(kTokens)];
        input->replace(at, std::min(left, token.size()), token);
      }
    }
  }

  std::mt19937_64 random_;
  const size_t most_;
};

// Runs the input; true if it reached code that no earlier one has.
bool Run(const Target& target, const std::string& input, std::bitset<kEdges>* known,
         std::string* violation) {
  previous_place = 0;
  current_input = &input;
  *violation = target(input);
  current_input = nullptr;
  if (!std::exchange(any_edge, false)) return false;  // nothing is instrumented
  const bool is_new = (edges_of_run & ~*known).any();
  *known |= edges_of_run;
  edges_of_run.reset();
  return is_new;
}

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::atoll(text);
}

}  // namespace

// Called by every basic block under --config=fuzz.
extern "C" __attribute__((no_sanitize("address"))) void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  edges_of_run[((place >> 1) ^ (previous_place << 3) ^ (place >> 17)) % kEdges] = true;
  previous_place = place;
  any_edge = true;
}

FuzzResult Fuzz(const FuzzOptions& options, const Target& target) {
  CatchCrashes(options.name);
  FuzzResult result;
  std::bitset<kEdges> known;
  std::vector<std::string> pool = options.seeds;
  const auto run = [&](const std::string& input) {
    std::string violation;
    const bool is_new = Run(target, input, &known, &violation);
    ++result.executions;
    if (!violation.empty()) {
      result.violation = absl::StrCat(violation, "; input \"", absl::CHexEscape(input), "\"");
    }
    return is_new;
  };
  if (const char* file = std::getenv("MLA_FUZZ_FILE"); file != nullptr && *file != '\0') {
    std::ifstream stream(file, std::ios::binary);
    std::ostringstream bytes;
    bytes << stream.rdbuf();
    run(bytes.str());
    return result;
  }
  for (const std::string& seed : options.seeds) {
    run(seed);
    if (!result.violation.empty()) return result;
  }
  Mutator mutator(static_cast<uint64_t>(FromEnvironment("MLA_TEST_SEED", 1)),
                  options.input_bytes_max);
  const int64_t seconds = FromEnvironment("MLA_FUZZ_SECONDS", 0);
  const int64_t executions =
      options.executions * (FromEnvironment("MLA_TEST_LONG", 0) != 0 ? 100 : 1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (result.violation.empty() &&
         (seconds > 0 ? std::chrono::steady_clock::now() < end : result.executions < executions)) {
    std::string input = mutator.Mutate(pool);
    if (!run(input)) continue;
    ++result.kept;
    pool.push_back(std::move(input));
  }
  return result;
}

}  // namespace mla::fuzz
