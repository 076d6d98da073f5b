// Adds the commands that show more than one reply of a server: version, top, size, contexts.
#ifndef MLA_CLIENT_MLACTL_VIEWS_VIEW_COMMANDS_H_
#define MLA_CLIENT_MLACTL_VIEWS_VIEW_COMMANDS_H_

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

void AddVersion(Program* program);
void AddTop(Program* program);
void AddSize(Program* program);
// Adds the commands contexts, set-context, use-context and delete-context.
void AddContexts(Program* program);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_VIEWS_VIEW_COMMANDS_H_
