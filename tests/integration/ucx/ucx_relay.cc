// A relay's process for tests whose own program is not mla-server.
#include <string_view>

#include "relay/relay_channel.h"
#include "relay/relay_main.h"

int main(int argc, char** argv) {
  if (argc != 2 || std::string_view(argv[1]) != mla::relay::kRelayCommand) return 2;
  return mla::relay::RunRelay();
}
