// Commands that ask a server what it is and does, and tell it to stop. Each prints its result and
// returns the exit code (command_line.h).
#ifndef MLA_CLIENT_MLACTL_ADMIN_COMMANDS_H_
#define MLA_CLIENT_MLACTL_ADMIN_COMMANDS_H_

#include "client/mlactl/cli/command_line.h"

namespace mla::mlactl {

int Info(const Arguments& arguments);
int Status(const Arguments& arguments);
int Watch(const Arguments& arguments);
int Models(const Arguments& arguments);
int Sequences(const Arguments& arguments);
int Health(const Arguments& arguments);
int Drain(const Arguments& arguments);
int CancelDrain(const Arguments& arguments);
int Quotas(const Arguments& arguments);
int Quota(const Arguments& arguments);
int SetQuota(const Arguments& arguments);
int EvictSequences(const Arguments& arguments);
int EvictModel(const Arguments& arguments);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_ADMIN_COMMANDS_H_
