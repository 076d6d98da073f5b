// Gives libFuzzer the target's seeds: writes them to the corpus, which is the first argument that
// is a folder.
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/fuzz/harness/target.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  namespace fs = std::filesystem;
  for (int i = 1; i < *argc; ++i) {
    const fs::path folder = (*argv)[i];
    if (!fs::is_directory(folder)) continue;
    size_t number = 0;
    for (const std::string& seed : mla::fuzz::TargetUnderTest().seeds) {
      const std::string name = "seed-" + std::to_string(number++);
      std::ofstream(folder / name, std::ios::binary) << seed;
    }
    break;
  }
  return 0;
}
