// Reports to the service manager that started the process: systemd's notification protocol, one
// datagram of NAME=VALUE lines to the socket that $NOTIFY_SOCKET names (sd_notify(3)). Without that
// variable nothing is sent.
//
// The protocol is stable and a dozen lines long, so no library is needed for it.
// Threading: any thread.
#ifndef MLA_SERVER_PROCESS_SERVICE_MANAGER_H_
#define MLA_SERVER_PROCESS_SERVICE_MANAGER_H_

#include <string>

namespace mla::server {

// Returns true if a manager has got the text. Never blocks: a manager that does not read misses it.
bool NotifyManager(const std::string& text);

// Returns "RELOADING=1" with the time that systemd asks for.
std::string ReloadingText();

}  // namespace mla::server

#endif  // MLA_SERVER_PROCESS_SERVICE_MANAGER_H_
