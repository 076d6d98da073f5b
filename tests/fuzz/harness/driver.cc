// Runs a fuzz target without libFuzzer: its seeds, and a fixed number of mutations of them. With
// file names as arguments it runs only those files, e.g. the input of a crash.
//
// Environment: MLA_TEST_LONG runs a hundred times as many mutations, and MLA_TEST_SEED runs
// different ones. An input that crashes the target is written to crash-input in
// TEST_UNDECLARED_OUTPUTS_DIR or the working directory.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "base/testing/long_runs.h"
#include "tests/fuzz/harness/mutator.h"
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {
namespace {

// Data of the signal handler, which may not allocate.
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

void CatchCrashes() {
  const char* const folder = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR");
  std::snprintf(crash_file, sizeof(crash_file), "%s/crash-input", folder == nullptr ? "." : folder);
  // Sanitizers report first and then abort.
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) signal(number, OnCrash);
}

void RunOne(const std::string& input) {
  current_input = &input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  current_input = nullptr;
}

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::atoll(text);
}

int RunFile(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  if (!(bytes << file.rdbuf())) {
    std::fprintf(stderr, "fuzz: cannot read %s\n", path);
    return 1;
  }
  RunOne(bytes.str());
  return 0;
}

int RunTarget() {
  const FuzzTarget target = TargetUnderTest();
  if (target.seeds.empty()) {
    std::fprintf(stderr, "fuzz: no seeds\n");
    return 1;
  }
  for (const std::string& seed : target.seeds) RunOne(seed);
  const int64_t executions = target.executions * (IsLongRun() ? 100 : 1);
  Mutator mutator(static_cast<uint64_t>(FromEnvironment("MLA_TEST_SEED", 1)), target.seeds,
                  target.input_bytes_max);
  for (int64_t i = 0; i < executions; ++i) RunOne(mutator.Next());
  std::printf("%zu seeds, %" PRId64 " mutated inputs\n", target.seeds.size(), executions);
  return 0;
}

}  // namespace
}  // namespace mla::fuzz

int main(int argc, char** argv) {
  mla::fuzz::CatchCrashes();
  int code = 0;
  for (int i = 1; i < argc && code == 0; ++i) code = mla::fuzz::RunFile(argv[i]);
  return argc > 1 ? code : mla::fuzz::RunTarget();
}
