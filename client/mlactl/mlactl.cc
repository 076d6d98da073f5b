// The main program of mlactl, the command line of a server.
#include <span>

#include "client/mlactl/commands.h"

int main(int argc, char** argv) {
  mla::mlactl::Program program;
  mla::mlactl::AddCommands(&program);
  return program.Run(std::span<const char* const>(argv + 1, argv + argc));
}
