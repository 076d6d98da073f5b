// mlactl: what a server is, does and can do, from the command line.
#include <cstdio>
#include <span>
#include <vector>

#include "client/mlactl/commands.h"

int main(int argc, char** argv) {
  return mla::mlactl::RunMlactl(std::span<const char* const>(argv + 1, argv + argc));
}
